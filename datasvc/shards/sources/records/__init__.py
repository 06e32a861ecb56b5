"""Sources of record files: TFRecord, and LMDB databases of Caffe's messages or other values."""
