// `import torch_npu` before `import torch` skips torch's backend entry points, and with them the Python side of the
// soft NPU; aclInit, the first thing that torch_npu does with a device, makes up for that.
#include <Python.h>

#include "common/softnpu.h"

extern "C" aclError softnpu_start_python() {
  if (!Py_IsInitialized()) return ACL_SUCCESS;  // a C++ program
  const PyGILState_STATE state = PyGILState_Ensure();
  PyObject* module = PyImport_ImportModule("vllm_ascend_moe.softnpu");
  PyObject* result = module == nullptr ? nullptr : PyObject_CallMethod(module, "autoload", nullptr);
  const bool good = result != nullptr;
  if (!good) PyErr_Print();
  Py_XDECREF(result);
  Py_XDECREF(module);
  PyGILState_Release(state);
  return good ? ACL_SUCCESS : softnpu::fail(ACL_ERROR_INTERNAL_ERROR, "vllm_ascend_moe.softnpu cannot be loaded");
}
