// ASCEND_MOE_BEGIN("avx2,fma") ... ASCEND_MOE_END: the code between is compiled for these instruction sets.
#pragma once

#if defined(__clang__)
#define ASCEND_MOE_PRAGMA(text) _Pragma(#text)
#define ASCEND_MOE_BEGIN(target_list) \
  ASCEND_MOE_PRAGMA(clang attribute push(__attribute__((target(target_list))), apply_to = function))
#define ASCEND_MOE_END _Pragma("clang attribute pop")
#else
#define ASCEND_MOE_PRAGMA(text) _Pragma(#text)
#define ASCEND_MOE_BEGIN(target_list) ASCEND_MOE_PRAGMA(GCC push_options) ASCEND_MOE_PRAGMA(GCC target(target_list))
#define ASCEND_MOE_END _Pragma("GCC pop_options")
#endif
