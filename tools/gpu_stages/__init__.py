"""The stages of `gpu_day.py`: what is tested and measured on a machine with a GPU, a module for each."""
