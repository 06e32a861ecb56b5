"""Sources of record files: TFRecord, RecordIO of MXNet, and LMDB databases of Caffe's messages or other values."""
