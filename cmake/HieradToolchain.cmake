# Language, warnings, sanitizers, ccache and mold; decides HIERAD_CUDA.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_FLAGS_RELEASE "-O2" CACHE STRING "")
set(CMAKE_CUDA_FLAGS_RELEASE "-O2" CACHE STRING "")

# No -fPIC anywhere: everything is linked into executables, and one set of flags lets all targets share a
# precompiled header.
add_compile_options(
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wno-missing-field-initializers>")
if(HIERAD_WERROR)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Werror>")
endif()
add_link_options(LINKER:--as-needed)
include_directories(${PROJECT_SOURCE_DIR})  # "base/x.h", "worker/y/z.h"

if(HIERAD_SANITIZE)
  list(JOIN HIERAD_SANITIZE "," _sanitize)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fsanitize=${_sanitize};-fno-omit-frame-pointer>")
  if(_sanitize MATCHES undefined)
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fno-sanitize-recover=undefined>")
  endif()
  # GCC 12 reports false positives under the sanitizers.
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Wno-maybe-uninitialized>")
  if(_sanitize MATCHES thread)
    add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-Wno-tsan>")
  endif()
  add_link_options(-fsanitize=${_sanitize})
endif()

find_program(HIERAD_CCACHE ccache)
if(HIERAD_CCACHE)
  # Paths below the source folder are hashed relative to it, so that a second clone compiles from the cache.
  set(_launcher env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime ${HIERAD_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${_launcher})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${_launcher})
endif()
find_program(HIERAD_MOLD mold)
if(HIERAD_MOLD)
  add_link_options(-fuse-ld=mold)
endif()

# CUDA: on where the toolkit that LibTorch is built for (13, with cuDNN and NCCL) is found.
if(HIERAD_WORKER AND NOT DEFINED HIERAD_CUDA)
  set(_cuda OFF)
  find_package(CUDAToolkit 13 QUIET)
  if(CUDAToolkit_FOUND AND CUDAToolkit_NVCC_EXECUTABLE)
    find_path(HIERAD_CUDNN_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
    find_path(HIERAD_NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
    if(HIERAD_CUDNN_INCLUDE AND HIERAD_NCCL_INCLUDE)
      set(_cuda ON)
    endif()
  endif()
  option(HIERAD_CUDA "Build the worker's CUDA part; OFF: a worker for CPU ranks only" ${_cuda})
endif()
if(NOT HIERAD_WORKER)
  set(HIERAD_CUDA OFF)
endif()
if(HIERAD_CUDA)
  set(CMAKE_CUDA_ARCHITECTURES 90a CACHE STRING "GPU architectures to compile for")
  set(CMAKE_CUDA_RUNTIME_LIBRARY Shared)  # one libcudart: the one that LibTorch loads
  find_package(CUDAToolkit 13 REQUIRED)
  if(NOT CMAKE_CUDA_COMPILER)
    set(CMAKE_CUDA_COMPILER ${CUDAToolkit_NVCC_EXECUTABLE})
  endif()
  enable_language(CUDA)
  string(APPEND CMAKE_CUDA_FLAGS " -std=c++20")  # CMake 3.25 knows no CUDA_STANDARD 20 of nvcc
endif()
message(STATUS "hierad: worker ${HIERAD_WORKER}, CUDA ${HIERAD_CUDA}, sanitizers '${HIERAD_SANITIZE}', build ${CMAKE_BUILD_TYPE}")
