// libatb.so as torch_npu's ATB plug-in links to it, so that the `atb::` operators exist. They are emulated where the
// dispatcher calls them (vllm_ascend_moe/softnpu/overrides); one that is not gets here, and fails with its name.
#include <cstdint>
#include <string>

namespace softnpu {
int not_emulated(const char* name);
}

namespace atb {

class Context;
class Operation;
struct Tensor;
namespace infer {
struct LinearParam;
struct ElewiseParam;
struct RmsNormParam;
struct GroupTopkParam;
struct SelfAttentionParam;
struct PagedAttentionParam;
struct ReshapeAndCacheParam;
struct RopeParam;
}  // namespace infer

int CreateContext(Context** context) {
  *context = nullptr;
  return 0;
}
int DestroyContext(Context*) { return 0; }
int DestroyOperation(Operation*) { return 0; }

class Utils {
 public:
  static uint64_t GetTensorSize(const Tensor&);
};
uint64_t Utils::GetTensorSize(const Tensor&) {
  softnpu::not_emulated("atb::Utils::GetTensorSize");
  return 0;
}

template <typename Param>
int CreateOperation(const Param& param, Operation** operation);

#define NOT_EMULATED(name)                                                           \
  template <>                                                                        \
  int CreateOperation(const infer::name##Param&, Operation** operation) {            \
    *operation = nullptr;                                                            \
    return softnpu::not_emulated("the ATB operation " #name " (an atb:: operator)"); \
  }

NOT_EMULATED(Linear)
NOT_EMULATED(Elewise)
NOT_EMULATED(RmsNorm)
NOT_EMULATED(GroupTopk)
NOT_EMULATED(SelfAttention)
NOT_EMULATED(PagedAttention)
NOT_EMULATED(ReshapeAndCache)
NOT_EMULATED(Rope)

}  // namespace atb
