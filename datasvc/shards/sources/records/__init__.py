"""Sources of single records: TFRecord, and LMDB with Caffe's messages."""
