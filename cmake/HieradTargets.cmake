# hierad_proto(TARGET [GRPC] ROOT DIR FILE... [LIBS TARGET...])
#   Static library of the .proto files (paths below ROOT), included as "hierad/v1/job.pb.h". GRPC adds service stubs
#   ("hierad/v1/control.grpc.pb.h") and links hierad::rpc; otherwise hierad::protobuf. LIBS: libraries whose .proto
#   files these import.
function(hierad_proto target)
  cmake_parse_arguments(PARSE_ARGV 1 A "GRPC" "ROOT" "LIBS")
  set(out ${PROJECT_BINARY_DIR}/gen)
  file(MAKE_DIRECTORY ${out})
  # Any .proto may be imported by any other: each is regenerated when one changes.
  file(GLOB_RECURSE all CONFIGURE_DEPENDS ${A_ROOT}/*.proto)
  set(sources)
  foreach(file ${A_UNPARSED_ARGUMENTS})
    string(REGEX REPLACE "\\.proto$" "" stem ${out}/${file})
    set(outputs ${stem}.pb.cc ${stem}.pb.h)
    set(plugin)
    if(A_GRPC)
      list(APPEND outputs ${stem}.grpc.pb.cc ${stem}.grpc.pb.h)
      set(plugin --grpc_out=${out} --plugin=protoc-gen-grpc=$<TARGET_FILE:gRPC::grpc_cpp_plugin>)
    endif()
    add_custom_command(OUTPUT ${outputs}
      COMMAND protobuf::protoc -I ${A_ROOT} --cpp_out=${out} ${plugin} ${A_ROOT}/${file}
      DEPENDS ${all} ${A_ROOT}/${file} COMMENT "protoc ${file}" VERBATIM)
    list(APPEND sources ${outputs})
  endforeach()
  add_library(${target} STATIC ${sources})
  target_compile_options(${target} PRIVATE -w)
  target_include_directories(${target} SYSTEM PUBLIC ${out})
  if(A_GRPC)
    target_link_libraries(${target} PUBLIC ${A_LIBS} hierad::rpc)
  else()
    target_link_libraries(${target} PUBLIC ${A_LIBS} hierad::protobuf)
  endif()
endfunction()

# hierad_binary(NAME SRCS FILE... LIBS TARGET...): an executable in build/*/bin.
function(hierad_binary name)
  cmake_parse_arguments(PARSE_ARGV 1 A "" "" "SRCS;LIBS")
  add_executable(${name} ${A_SRCS})
  target_link_libraries(${name} PRIVATE ${A_LIBS})
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
endfunction()

# hierad_test(NAME SRCS FILE... LIBS TARGET... [LABELS LABEL...] [TIMEOUT SECONDS])
#   A GoogleTest executable (gmock, gtest_main) in build/*/bin/tests, and one ctest of that name; 60 s unless TIMEOUT
#   says more. Label 'long' keeps it out of the default run, 'gpu' marks what needs a GPU, 'grpc' what speaks over gRPC, which
#   ThreadSanitizer cannot follow: such tests are not built with it; 'engine' is given to those of worker/, 'service' to the others; targets
#   hierad_tests_engine and hierad_tests_service make them. Its environment:
#   HIERAD_SOURCE_DIR, HIERAD_BIN_DIR, HIERAD_DEPS and HIERAD_PYTHON.
add_custom_target(hierad_tests_engine)
add_custom_target(hierad_tests_service)
function(hierad_test name)
  cmake_parse_arguments(PARSE_ARGV 1 A "" "TIMEOUT" "SRCS;LIBS;LABELS")
  if(NOT HIERAD_TESTS OR (HIERAD_SANITIZE MATCHES thread AND grpc IN_LIST A_LABELS))
    return()
  endif()
  hierad_binary(${name} SRCS ${A_SRCS} LIBS ${A_LIBS} GTest::gmock GTest::gtest GTest::gtest_main)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/tests)
  cmake_path(RELATIVE_PATH CMAKE_CURRENT_SOURCE_DIR BASE_DIRECTORY ${PROJECT_SOURCE_DIR} OUTPUT_VARIABLE room)
  if(room MATCHES "^worker")
    set(part engine)
  else()
    set(part service)
  endif()
  list(APPEND A_LABELS ${part})
  add_dependencies(hierad_tests_${part} ${name})
  add_test(NAME ${name} COMMAND ${name})
  hierad_test_properties(${name} TIMEOUT ${A_TIMEOUT} LABELS ${A_LABELS})
endfunction()

# hierad_script_test(NAME COMMAND WORD... [LABELS LABEL...] [TIMEOUT SECONDS]): a ctest of any command, such as a
# Python or shell script, with the same environment.
function(hierad_script_test name)
  if(NOT HIERAD_TESTS)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 1 A "" "TIMEOUT" "COMMAND;LABELS")
  add_test(NAME ${name} COMMAND ${A_COMMAND})
  hierad_test_properties(${name} TIMEOUT ${A_TIMEOUT} LABELS ${A_LABELS})
endfunction()

function(hierad_test_properties name)
  cmake_parse_arguments(PARSE_ARGV 1 A "" "TIMEOUT" "LABELS")
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 60)
  endif()
  set(environment HIERAD_SOURCE_DIR=${PROJECT_SOURCE_DIR} HIERAD_BIN_DIR=${CMAKE_RUNTIME_OUTPUT_DIRECTORY}
    HIERAD_DEPS=${HIERAD_DEPS} HIERAD_PYTHON=${HIERAD_DEPS}/venv/bin/python)
  if(HIERAD_SANITIZE MATCHES thread)
    list(APPEND environment
      TSAN_OPTIONS=ignore_noninstrumented_modules=1:suppressions=${PROJECT_SOURCE_DIR}/cmake/tsan.supp:halt_on_error=1)
  endif()
  set_tests_properties(${name} PROPERTIES TIMEOUT ${A_TIMEOUT} LABELS "${A_LABELS}" ENVIRONMENT "${environment}")
endfunction()

# Where tools/setup put LibTorch, the Python of the tests, and the data sets.
if(DEFINED ENV{HIERAD_DEPS})
  set(_deps $ENV{HIERAD_DEPS})
  cmake_path(ABSOLUTE_PATH _deps BASE_DIRECTORY ${PROJECT_SOURCE_DIR})
else()
  set(_deps ${PROJECT_SOURCE_DIR}/.deps)
endif()
set(HIERAD_DEPS ${_deps} CACHE PATH "Folder that tools/setup filled")
