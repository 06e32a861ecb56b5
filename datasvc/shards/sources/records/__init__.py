"""Sources of record files: TFRecord, and LMDB databases, also with Caffe's messages."""
