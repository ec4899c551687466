# csrc/proto: C++ lite classes (`#include "proto/allspark.pb.h"`), and the descriptor set from which
# Python builds its classes, so that there is no generated Python code to disagree with the
# installed protobuf.

# Newer protobuf releases have a CMake package that lists their dependencies; Debian's 3.21 has
# none.
find_package(Protobuf CONFIG QUIET)
if(NOT TARGET protobuf::libprotobuf-lite)
  find_package(Protobuf MODULE REQUIRED)
endif()
find_path(ALLSPARK_XXHASH_INCLUDE xxhash.h)
if(NOT ALLSPARK_XXHASH_INCLUDE)
  message(FATAL_ERROR "xxhash.h is missing (Debian: libxxhash-dev)")
endif()

set(as_generated "${CMAKE_CURRENT_BINARY_DIR}/generated")
set(ALLSPARK_DESCRIPTOR_SET "${as_generated}/allspark.desc")
set(as_proto "${CMAKE_CURRENT_SOURCE_DIR}/csrc/proto/allspark.proto")
file(MAKE_DIRECTORY "${as_generated}/proto")
add_custom_command(
  OUTPUT "${as_generated}/proto/allspark.pb.cc" "${as_generated}/proto/allspark.pb.h"
         "${ALLSPARK_DESCRIPTOR_SET}"
  COMMAND protobuf::protoc "-I${CMAKE_CURRENT_SOURCE_DIR}/csrc" "--cpp_out=${as_generated}"
          "--descriptor_set_out=${ALLSPARK_DESCRIPTOR_SET}" "${as_proto}"
  DEPENDS "${as_proto}" protobuf::protoc
  COMMENT "Generating the protobuf classes and the descriptor set"
  VERBATIM)

# Generated code is compiled without our warnings; its headers are system headers for those who
# include it.
add_library(as_proto STATIC "${as_generated}/proto/allspark.pb.cc")
target_include_directories(as_proto SYSTEM PUBLIC "${as_generated}")
target_link_libraries(as_proto PUBLIC protobuf::libprotobuf-lite Threads::Threads)
add_custom_target(as_descriptor_set ALL DEPENDS "${ALLSPARK_DESCRIPTOR_SET}")
add_dependencies(as_descriptor_set as_proto)  # one run of protoc for both
