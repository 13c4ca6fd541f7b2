# LibTorch from the Python wheel, as small imported targets. Not find_package(Torch): that turns protobuf::libprotobuf
# into a dummy, ignores CMAKE_CUDA_ARCHITECTURES and links two CUDA runtimes.
#   hierad::libtorch       ATen, c10 and torch; with HIERAD_CUDA also their CUDA parts and libcudart
#   hierad::nccl           (HIERAD_CUDA) with its header
#   hierad::cudnn_frontend, hierad::cutlass   (HIERAD_CUDA) headers
#   HIERAD_TORCH_RPATH     where LibTorch and what it loads lie; hierad::libtorch sets it on each program
if(NOT HIERAD_TORCH)
  file(GLOB _found ${HIERAD_DEPS}/venv/lib/python3*/site-packages/torch)
  if(NOT _found)
    message(FATAL_ERROR "LibTorch is not in ${HIERAD_DEPS}/venv: run tools/setup, name another by -DHIERAD_TORCH=.../site-packages/torch, or build without the worker by -DHIERAD_WORKER=OFF")
  endif()
  list(GET _found 0 _found)
  set(HIERAD_TORCH ${_found} CACHE PATH "site-packages/torch of the wheel" FORCE)
endif()
cmake_path(GET HIERAD_TORCH PARENT_PATH HIERAD_SITE_PACKAGES)

set(_torch_libraries c10 torch_cpu torch)
if(HIERAD_CUDA)
  list(APPEND _torch_libraries c10_cuda torch_cuda)
endif()
foreach(name ${_torch_libraries})
  add_library(hierad::${name} SHARED IMPORTED)
  set_target_properties(hierad::${name} PROPERTIES
    IMPORTED_LOCATION ${HIERAD_TORCH}/lib/lib${name}.so IMPORTED_SONAME lib${name}.so)
endforeach()

set(HIERAD_TORCH_RPATH ${HIERAD_TORCH}/lib)
foreach(part cu13 nccl cudnn cusparselt nvshmem cufile)
  if(EXISTS ${HIERAD_SITE_PACKAGES}/nvidia/${part}/lib)
    list(APPEND HIERAD_TORCH_RPATH ${HIERAD_SITE_PACKAGES}/nvidia/${part}/lib)
  endif()
endforeach()
list(JOIN HIERAD_TORCH_RPATH ":" _rpath)

add_library(hierad::libtorch INTERFACE IMPORTED)
# -idirafter, not -I or -isystem: the wheel ships headers of Protobuf 3.13 and fmt 12, which would hide the system's.
set(_after -idirafter ${HIERAD_TORCH}/include -idirafter ${HIERAD_TORCH}/include/torch/csrc/api/include)
list(JOIN _after " " _after_cxx)
list(JOIN _after "," _after_cuda)
target_compile_options(hierad::libtorch INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:SHELL:${_after_cxx}>"
  "$<$<COMPILE_LANGUAGE:CUDA>:SHELL:-Xcompiler ${_after_cuda}>")
target_link_options(hierad::libtorch INTERFACE LINKER:-rpath,${_rpath} LINKER:-rpath-link,${_rpath})
if(HIERAD_CUDA)
  target_compile_definitions(hierad::libtorch INTERFACE USE_DISTRIBUTED USE_C10D_NCCL)
  target_link_libraries(hierad::libtorch INTERFACE
    -Wl,--no-as-needed hierad::torch hierad::torch_cpu hierad::torch_cuda hierad::c10 hierad::c10_cuda -Wl,--as-needed
    CUDA::cudart)
  # NCCL: the wheel's where it was installed, else the toolkit's.
  find_library(HIERAD_NCCL_LIBRARY libnccl.so.2
    HINTS ${HIERAD_SITE_PACKAGES}/nvidia/nccl/lib ${CUDAToolkit_LIBRARY_DIR} NO_CACHE REQUIRED)
  find_path(HIERAD_NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS} REQUIRED)
  add_library(hierad::nccl SHARED IMPORTED)
  set_target_properties(hierad::nccl PROPERTIES
    IMPORTED_LOCATION ${HIERAD_NCCL_LIBRARY} INTERFACE_INCLUDE_DIRECTORIES ${HIERAD_NCCL_INCLUDE})
else()
  # libtorch.so itself would load libtorch_cuda.so.
  target_link_libraries(hierad::libtorch INTERFACE
    -Wl,--no-as-needed hierad::torch_cpu hierad::c10 -Wl,--as-needed)
endif()

if(HIERAD_CUDA)
  add_library(hierad::cudnn_frontend INTERFACE IMPORTED)
  add_library(hierad::cutlass INTERFACE IMPORTED)
  find_path(HIERAD_CUDNN_FRONTEND_INCLUDE cudnn_frontend.h
    HINTS ${HIERAD_SITE_PACKAGES}/include ${HIERAD_DEPS}/venv/include REQUIRED)
  find_path(HIERAD_CUTLASS_INCLUDE cutlass/cutlass.h
    HINTS ${HIERAD_SITE_PACKAGES}/cutlass_library/source/include REQUIRED)
  target_include_directories(hierad::cudnn_frontend INTERFACE ${HIERAD_CUDNN_FRONTEND_INCLUDE})
  find_library(HIERAD_CUDNN_LIBRARY NAMES cudnn libcudnn.so.9
    HINTS ${HIERAD_SITE_PACKAGES}/nvidia/cudnn/lib ${CUDAToolkit_LIBRARY_DIR} REQUIRED)
  target_link_libraries(hierad::cudnn_frontend INTERFACE ${HIERAD_CUDNN_LIBRARY} CUDA::cudart ${CMAKE_DL_LIBS})
  target_include_directories(hierad::cutlass INTERFACE ${HIERAD_CUTLASS_INCLUDE}
    ${HIERAD_CUTLASS_INCLUDE}/../tools/util/include)
endif()

# hierad_torch_pch(TARGET): the target's C++ files start from one precompiled <ATen/ATen.h>, compiled once a build
# folder (16 s of compiling a file become 3). For targets that link hierad::libtorch and add no compile options of
# their own.
add_library(hierad_torch_header OBJECT EXCLUDE_FROM_ALL ${PROJECT_BINARY_DIR}/torch_header.cc)
if(NOT EXISTS ${PROJECT_BINARY_DIR}/torch_header.cc)
  file(WRITE ${PROJECT_BINARY_DIR}/torch_header.cc "// Compiled only for its precompiled header.\n")
endif()
target_link_libraries(hierad_torch_header PRIVATE hierad::libtorch)
target_compile_options(hierad_torch_header PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>")
target_precompile_headers(hierad_torch_header PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:<ATen/ATen.h$<ANGLE-R>>")
function(hierad_torch_pch target)
  target_link_libraries(${target} PRIVATE hierad::libtorch)
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>")
  target_precompile_headers(${target} REUSE_FROM hierad_torch_header)
endfunction()
