#include "opapi/op.h"

#include <sstream>

#include "common/poison.h"

struct aclOpExecutor {
  std::string name;
  uint64_t devices;  // bit per device that a tensor of the call lives on
  std::vector<const aclTensor*> outputs;
  std::function<void()> body;
};

namespace softnpu {
namespace {

// Devices of the tensors made since the last call was planned: those are that call's.
thread_local uint64_t devices_seen = 0;

std::string call_name(const char* function) {
  const std::string name = function;
  const std::string suffix = "GetWorkspaceSize";
  return name.size() > suffix.size() ? name.substr(0, name.size() - suffix.size()) : name;
}

}  // namespace

at::ScalarType scalar_type(aclDataType type) {
  switch (type) {
    case ACL_FLOAT:
      return at::kFloat;
    case ACL_FLOAT16:
      return at::kHalf;
    case ACL_BF16:
      return at::kBFloat16;
    case ACL_DOUBLE:
      return at::kDouble;
    case ACL_INT8:
      return at::kChar;
    case ACL_UINT8:
      return at::kByte;
    case ACL_INT16:
      return at::kShort;
    case ACL_UINT16:
      return at::kUInt16;
    case ACL_INT32:
      return at::kInt;
    case ACL_UINT32:
      return at::kUInt32;
    case ACL_INT64:
      return at::kLong;
    case ACL_UINT64:
      return at::kUInt64;
    case ACL_BOOL:
      return at::kBool;
    case ACL_COMPLEX32:
      return at::kComplexHalf;
    case ACL_COMPLEX64:
      return at::kComplexFloat;
    case ACL_COMPLEX128:
      return at::kComplexDouble;
    case ACL_FLOAT8_E4M3FN:
      return at::kFloat8_e4m3fn;
    case ACL_FLOAT8_E5M2:
      return at::kFloat8_e5m2;
    case ACL_FLOAT8_E8M0:
      return at::kFloat8_e8m0fnu;
    default:
      TORCH_CHECK(false, "softnpu: aclDataType ", static_cast<int>(type),
                  " is not emulated; add it to scalar_type in csrc/softnpu/opapi/op.cpp");
  }
}

void write(const aclTensor* output, const at::Tensor& value) {
  TORCH_CHECK(output->sizes() == value.sizes(), "softnpu: an operator computed shape ", value.sizes(),
              ", and torch_npu's host code allotted ", output->sizes());
  output->copy_(value);
}

aclnnStatus Planner::operator*(std::function<void()> body) {
  *workspace = 0;
  *executor = new aclOpExecutor{call_name(name), devices_seen, outputs, std::move(body)};
  devices_seen = 0;
  return ACL_SUCCESS;
}

aclnnStatus run(aclOpExecutor* raw, aclrtStream stream) {
  const std::shared_ptr<aclOpExecutor> executor(raw);
  const int32_t device = device_of(stream);
  if (device >= 0 && (executor->devices & ~(1ull << device)) != 0) {
    std::ostringstream out;
    out << executor->name << " on a stream of device " << device << " has a tensor of another device";
    return fail(ACL_ERROR_RT_PARAM_INVALID, out.str());
  }
  return submit(stream, executor->name.c_str(), [executor]() -> aclError {
    const at::AutoDispatchBelowAutograd below;
    for (const aclTensor* output : executor->outputs) {
      if (output != nullptr) poison(*output);
    }
    executor->body();
    return ACL_SUCCESS;
  });
}

}  // namespace softnpu

namespace {

// Bytes from the first to the last element of a view.
uint64_t extent(const int64_t* sizes, const int64_t* strides, uint64_t dims, uint64_t element) {
  uint64_t last = 0;
  for (uint64_t d = 0; d < dims; ++d) {
    if (sizes[d] == 0) return 0;
    last += static_cast<uint64_t>((sizes[d] - 1) * strides[d]);
  }
  return (last + 1) * element;
}

// Tasks of a graph refer to the objects of the call that was captured: while one is, nothing is given back.
template <typename T>
int destroy(const T* object) {
  if (!softnpu::any_capture()) delete object;
  return ACL_SUCCESS;
}

template <typename Array, typename T>
Array* make_array(const T* values, uint64_t size) {
  auto* array = new Array;
  array->assign(values, values + size);
  return array;
}

}  // namespace

extern "C" {

aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dims, aclDataType type, const int64_t* strides,
                           int64_t offset, aclFormat format, const int64_t* storage_sizes, uint64_t storage_dims,
                           void* data) {
  const at::ScalarType scalar = softnpu::scalar_type(type);
  const uint64_t element = c10::elementSize(scalar);
  char* first = static_cast<char*>(data) + offset * static_cast<int64_t>(element);
  if (const uint64_t bytes = extent(sizes, strides, dims, element)) {
    std::string problem;
    const int32_t device = softnpu::owner(first, bytes, &problem);
    TORCH_CHECK(problem.empty(), "softnpu: tensor given to an operator: ", problem);
    if (device >= 0) softnpu::devices_seen |= 1ull << device;
  }
  auto* tensor = new aclTensor;
  static_cast<at::Tensor&>(*tensor) = at::from_blob(first, {sizes, dims}, {strides, dims}, at::TensorOptions(scalar));
  tensor->type = type;
  tensor->format = format;
  tensor->storage_shape.assign(storage_sizes, storage_sizes + storage_dims);
  return tensor;
}
int aclDestroyTensor(const aclTensor* tensor) { return destroy(tensor); }
int aclGetViewShape(const aclTensor* tensor, int64_t** sizes, uint64_t* dims) {
  *dims = tensor->sizes().size();
  *sizes = new int64_t[*dims];
  std::copy(tensor->sizes().begin(), tensor->sizes().end(), *sizes);
  return ACL_SUCCESS;
}

aclScalar* aclCreateScalar(void* value, aclDataType type) {
  return new aclScalar(at::from_blob(value, {}, at::TensorOptions(softnpu::scalar_type(type))).item());
}
int aclDestroyScalar(const aclScalar* scalar) { return destroy(scalar); }

aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t size) { return make_array<aclIntArray>(values, size); }
int aclDestroyIntArray(const aclIntArray* array) { return destroy(array); }
aclFloatArray* aclCreateFloatArray(const float* values, uint64_t size) {
  return make_array<aclFloatArray>(values, size);
}
int aclDestroyFloatArray(const aclFloatArray* array) { return destroy(array); }
aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t size) { return make_array<aclBoolArray>(values, size); }
int aclDestroyBoolArray(const aclBoolArray* array) { return destroy(array); }

aclTensorList* aclCreateTensorList(const aclTensor* const* tensors, uint64_t size) {
  return make_array<aclTensorList>(tensors, size);
}
// A list owns its tensors.
int aclDestroyTensorList(const aclTensorList* list) {
  for (const aclTensor* tensor : *list) destroy(tensor);
  return destroy(list);
}
aclScalarList* aclCreateScalarList(const aclScalar* const* scalars, uint64_t size) {
  auto* list = new aclScalarList;
  for (uint64_t i = 0; i < size; ++i) list->push_back(*scalars[i]);
  for (uint64_t i = 0; i < size; ++i) destroy(scalars[i]);
  return list;
}
int aclDestroyScalarList(const aclScalarList* list) { return destroy(list); }
int aclDestroyAclOpExecutor(aclOpExecutor* executor) {
  delete executor;
  return ACL_SUCCESS;
}

}  // extern "C"
