// Writing MLA's cache.
#include "opapi/check.h"
#include "opapi/rotary.h"

using softnpu::write;

namespace {

// values [B, N, S, D] into a cache, at `index`; a negative index writes nothing.
void scatter(const at::Tensor& cache, const at::Tensor& index, const at::Tensor& values, const std::string& mode) {
  const auto rows = values.to(cache.scalar_type()).transpose(1, 2).flatten(0, 1);  // [B * S, N, D]
  const auto slots = index.flatten();
  const int64_t inner = mode == "Norm" ? cache.size(2) : cache.size(1);  // positions of a sequence, or of a block
  softnpu::check_values("npu_kv_rmsnorm_rope_cache", "index", slots, std::numeric_limits<int64_t>::min(),
                        mode == "Norm" ? inner - 1 : cache.size(0) * inner - 1);
  at::Tensor view = cache.transpose(1, 2);              // [B, S, N, D]
  if (mode == "PA" || mode == "PA_BNSD") view = cache;  // [blocks, block, N, D]
  if (mode == "PA_NZ") {  // D is cut into pieces of 16, each outside the block's positions
    const std::vector<int64_t> shape{cache.size(0), cache.size(2), cache.size(3) / 16, inner, 16};
    view = cache.view(shape).permute({0, 3, 1, 2, 4});
  }
  for (int64_t row = 0; row < slots.size(0); ++row) {
    const int64_t slot = slots[row].item<int64_t>();
    if (slot < 0) continue;
    const int64_t outer = mode == "Norm" ? row / values.size(2) : slot / inner;
    auto place = view.select(0, outer).select(0, slot % inner);
    place.copy_(rows.select(0, row).view(place.sizes()));
  }
}

}  // namespace

// kv [B, N, S, Dv + Dk]: ckv = rms_norm(kv[..., :Dv]) * gamma, k = interleaved rope of kv[..., Dv:]; both go to their
// caches, and to the outputs where those are wanted.
ACLNN_OP(aclnnKvRmsNormRopeCache, const aclTensor* kv, const aclTensor* gamma, const aclTensor* cos,
         const aclTensor* sin, const aclTensor* index, aclTensor* k_cache, aclTensor* ckv_cache,
         const aclTensor* k_scale, const aclTensor* ckv_scale, const aclTensor* k_offset, const aclTensor* ckv_offset,
         double epsilon, const char* cache_mode, bool output_kv, aclTensor* k_out, aclTensor* ckv_out) {
  const char* op = "npu_kv_rmsnorm_rope_cache";
  const std::string mode = cache_mode;
  EMULATED(mode == "Norm" || mode == "PA" || mode == "PA_BNSD" || mode == "PA_NZ", op, "cache_mode", mode);
  EMULATED(!k_scale && !ckv_scale && !k_offset && !ckv_offset, op, "k_rope_scale or c_kv_scale", "a tensor");
  const int64_t dv = gamma->size(0), dk = kv->size(3) - dv, b = kv->size(0), s = kv->size(2);
  TORCH_CHECK(kv->size(1) == 1, op, ": kv ", kv->sizes(), " must have one head");
  TORCH_CHECK(dk > 0 && dk % 2 == 0 && cos->size(3) == dk && cos->size(0) == b && cos->sizes() == sin->sizes(), op,
              ": kv ", kv->sizes(), " less gamma ", gamma->sizes(), " leaves ", dk, " to rotate; cos is ", cos->sizes(),
              ", sin ", sin->sizes());
  TORCH_CHECK(index->scalar_type() == at::kLong && index->numel() == b * s, op, ": index ", index->sizes(), " ",
              index->scalar_type(), " must be int64, one for each of ", b * s, " tokens");
  TORCH_CHECK(k_cache->dim() == 4 && ckv_cache->dim() == 4 && k_cache->size(3) == dk && ckv_cache->size(3) == dv, op,
              ": k_cache ", k_cache->sizes(), " and ckv_cache ", ckv_cache->sizes(), " must end with ", dk, " and ",
              dv);
  TORCH_CHECK(k_cache->scalar_type() == kv->scalar_type() && ckv_cache->scalar_type() == kv->scalar_type(), op,
              ": kv is ", kv->scalar_type(), ", the caches are ", k_cache->scalar_type(), " and ",
              ckv_cache->scalar_type());
  TORCH_CHECK(mode != "PA_NZ" || (dk % 16 == 0 && dv % 16 == 0), op,
              ": PA_NZ needs head sizes in multiples of 16; got ", dk, " and ", dv);
  ACLNN_RUN(k_out, ckv_out) {
    const auto wide = kv->to(at::kFloat).narrow(3, 0, dv);
    const auto ckv = wide * at::rsqrt(wide.square().mean(-1, true) + epsilon) * gamma->to(at::kFloat);
    const auto k = softnpu::interleave_rope(kv->narrow(3, dv, dk), *cos, *sin);
    scatter(*k_cache, *index, k, mode);
    scatter(*ckv_cache, *index, ckv, mode);
    if (!output_kv) return;
    write(k_out, k);
    write(ckv_out, ckv);
  };
}
