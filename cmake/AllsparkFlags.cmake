# Compiler flags that every target of the project shares.
#
# Numerics: no -ffast-math anywhere, and -ffp-contract=off, so that a multiply and an add are fused
# only where the source says so; results must not depend on what a compiler chooses to contract.

add_library(as_flags INTERFACE)
target_include_directories(as_flags INTERFACE
  "${CMAKE_CURRENT_SOURCE_DIR}/csrc" "${CMAKE_CURRENT_SOURCE_DIR}/csrc/include")
target_compile_options(as_flags INTERFACE -ffp-contract=off -Wall -Wextra -Wshadow)
# CMAKE_UNITY_BUILD, which presets and setup.py set, compiles eight sources at once, because headers
# take most of the time. So names in anonymous namespaces must differ within a target. GCC takes the
# sources for headers, and warns of classes with members of types that have no linkage.
if(CMAKE_UNITY_BUILD)
  target_compile_options(as_flags INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endif()
if(ALLSPARK_WERROR)
  target_compile_options(as_flags INTERFACE -Werror)
endif()

# Sanitizers instrument everything, including protobuf's generated code, so these options are set
# for the whole directory. Their reports need lines and names, not variables: -g1 halves the compile
# time.
if(ALLSPARK_SANITIZE)
  list(JOIN ALLSPARK_SANITIZE "," as_sanitizers)
  add_compile_options(-fsanitize=${as_sanitizers} -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${as_sanitizers})
  if("undefined" IN_LIST ALLSPARK_SANITIZE)
    add_compile_options(-fno-sanitize-recover=undefined)
  endif()
endif()
if(ALLSPARK_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "ALLSPARK_FUZZ needs clang (libFuzzer); the compiler is ${CMAKE_CXX_COMPILER}")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()
