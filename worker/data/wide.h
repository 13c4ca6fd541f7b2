// HIERAD_WIDE before a function with plain loops: compiled also for AVX2, chosen when the program is loaded. Same results: AVX2
// alone contracts nothing. Not under the sanitizers, whose run time is not up yet when the choice is made.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define HIERAD_WIDE __attribute__((target_clones("avx2", "default")))
#else
#define HIERAD_WIDE
#endif
