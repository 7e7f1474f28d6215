"""Readers and writers of producers' files, one module a family; opens no dataset."""
