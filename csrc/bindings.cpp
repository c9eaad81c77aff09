// Lets Python import the library; importing it registers the operators of torch.ops.ascend_moe.
#include <Python.h>

PyMODINIT_FUNC PyInit__native() {
  static PyModuleDef module = {
      PyModuleDef_HEAD_INIT, "_native", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
  return PyModule_Create(&module);
}
