"""How a batch is laid out, one module a trainer family; reads no file and knows no rank."""
