"""What people would use instead of hsloader, one file each, all with the same four names.

``NAME``      as the table says it
``HOLDS``     what bfloat16 becomes in its files
``SETTINGS``  keyword arguments of ``opened``, of which the runner finds the best
``convert(source, target)``            write the samples of the ``.pt`` files in ``source`` (absent: it reads those)
``opened(target, batch, **settings)``  an object whose ``epoch()`` yields lists of ``batch`` samples in random order

A file whose package cannot be had says so in ``MISSING``.
"""
