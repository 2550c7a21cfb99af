"""kvtide inside other people's engines, one folder or file each."""
