// Libraries that torch_npu wants by name; what they would define is in libascendcl.so.
