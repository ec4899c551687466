# csrc/bench/NAME_bench.cc becomes the Google Benchmark executable NAME_bench.

find_package(benchmark QUIET)
if(NOT benchmark_FOUND)
  message(WARNING "ALLSPARK_BENCH is on, but Google Benchmark is not installed: nothing is built")
  return()
endif()
file(GLOB as_bench_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/csrc/bench/*_bench.cc")
foreach(as_source IN LISTS as_bench_sources)
  get_filename_component(as_name "${as_source}" NAME_WE)
  add_executable(${as_name} "${as_source}")
  target_link_libraries(${as_name} PRIVATE as_engine benchmark::benchmark benchmark::benchmark_main)
endforeach()
