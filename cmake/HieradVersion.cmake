# hierad_version: hierad/version.h (fixed) and one version.cc, rewritten at build time only when the commit changes.
# Run as a script (cmake -P) this same file writes the .cc.
if(CMAKE_SCRIPT_MODE_FILE)
  set(commit unknown)
  execute_process(COMMAND git -C ${SOURCE} rev-parse --short=12 HEAD
    OUTPUT_VARIABLE head RESULT_VARIABLE failed OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(NOT failed)
    set(commit ${head})
    execute_process(COMMAND git -C ${SOURCE} --no-optional-locks status --porcelain --untracked-files=no
      OUTPUT_VARIABLE changes ERROR_QUIET)
    if(changes)
      string(APPEND commit -dirty)
    endif()
  endif()
  set(text "#include \"hierad/version.h\"\n\nnamespace hierad {\n")
  string(APPEND text "std::string_view Version() { return \"${VERSION}\"; }\n")
  string(APPEND text "std::string_view Commit() { return \"${commit}\"; }\n")
  string(APPEND text "std::string_view BuildType() { return \"${BUILD_TYPE}\"; }\n}  // namespace hierad\n")
  set(old)
  if(EXISTS ${OUT})
    file(READ ${OUT} old)
  endif()
  if(NOT old STREQUAL text)
    file(WRITE ${OUT} "${text}")
  endif()
  return()
endif()

set(_dir ${PROJECT_BINARY_DIR}/version)
file(CONFIGURE OUTPUT ${_dir}/hierad/version.h CONTENT [[
#ifndef HIERAD_VERSION_H_
#define HIERAD_VERSION_H_

#include <string_view>

namespace hierad {

std::string_view Version();    // "0.1.0"
std::string_view Commit();     // twelve digits, "-dirty" after them if the tree had changes; "unknown" without git
std::string_view BuildType();  // "Release", "Debug", ...

}  // namespace hierad

#endif  // HIERAD_VERSION_H_
]] @ONLY)
add_custom_target(hierad_version_source
  COMMAND ${CMAKE_COMMAND} -DSOURCE=${PROJECT_SOURCE_DIR} -DVERSION=${PROJECT_VERSION}
          -DBUILD_TYPE=${CMAKE_BUILD_TYPE} -DOUT=${_dir}/version.cc -P ${CMAKE_CURRENT_LIST_FILE}
  BYPRODUCTS ${_dir}/version.cc COMMENT "Commit" VERBATIM)
add_library(hierad_version STATIC ${_dir}/version.cc)
add_dependencies(hierad_version hierad_version_source)
target_include_directories(hierad_version PUBLIC ${_dir})
