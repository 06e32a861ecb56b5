"""The modules of ``horovod.common`` that programs import from, under their names there."""
