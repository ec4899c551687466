# tests/fuzz/NAME_fuzz.cc becomes the libFuzzer executable NAME_fuzz.

file(GLOB as_fuzz_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/tests/fuzz/*_fuzz.cc")
foreach(as_source IN LISTS as_fuzz_sources)
  get_filename_component(as_name "${as_source}" NAME_WE)
  add_executable(${as_name} "${as_source}")
  target_include_directories(${as_name} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}/tests")
  target_link_libraries(${as_name} PRIVATE as_engine)
  target_link_options(${as_name} PRIVATE -fsanitize=fuzzer)
endforeach()
