add_library(hierad_step_defaults STATIC reconstruct.cc step.cc)
target_link_libraries(hierad_step_defaults PUBLIC hierad_base)

# The fused step: no LibTorch in it, so that its tests show that it needs none.
add_library(hierad_fused STATIC fused_executor.cc fused_op_cpu.cc fused_step.cc
  $<IF:$<BOOL:${HIERAD_CUDA}>,fused_gpu_step.cc,fused_gpu_absent.cc>)
if(HIERAD_CUDA)
  target_sources(hierad_fused PRIVATE fused_op_gpu.cc lanes.cc)
  target_link_libraries(hierad_fused PUBLIC hierad_kernels)
endif()
target_link_libraries(hierad_fused PUBLIC hierad_base hierad_comm hierad_draws hierad_step_defaults)
# The plain kernels' inner loops have constant lengths; -O3 makes vector instructions of them.
set_source_files_properties(fused_op_cpu.cc PROPERTIES COMPILE_OPTIONS "$<$<CONFIG:Release>:-O3>")

hierad_test(fused_executor_test SRCS fused_executor_test.cc fused_ranks_test.cc fused_shard_test.cc LIBS hierad_fused TIMEOUT 120)
