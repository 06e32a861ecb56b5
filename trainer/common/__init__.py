"""The modules of `horovod.common` that programs import, under the same names."""
