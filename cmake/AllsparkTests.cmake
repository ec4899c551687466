# tests/cpp/FOLDER/**/*_test.cc becomes the executable test_FOLDER, *_slow_test.cc test_FOLDER_slow,
# each with one CTest entry per test and the label unit or slow. A test links its own layer and
# those below it, so a layer's tests can be built while the layers above it cannot.

find_package(GTest REQUIRED)
include(GoogleTest)

set(as_tests_root "${CMAKE_CURRENT_SOURCE_DIR}/tests")
file(GLOB as_support_sources CONFIGURE_DEPENDS "${as_tests_root}/support/*.cc")
add_library(as_test_support STATIC ${as_support_sources})
# The emulated tables redefine what intrinsics mean, each in its own way.
set_target_properties(as_test_support PROPERTIES UNITY_BUILD OFF)
# Headers only: each test decides which layers it links.
target_link_libraries(as_test_support PUBLIC as_flags GTest::gtest)
target_include_directories(as_test_support PRIVATE "${as_tests_root}")
target_include_directories(as_test_support SYSTEM PRIVATE "${as_generated}")
add_dependencies(as_test_support as_proto)
# GCC warns of 64-byte vectors passed by value, which emulated AVX-512 does within one file.
target_compile_options(as_test_support PRIVATE -Wno-psabi)
# More optimisation takes minutes for the emulated kernels, which their tests do not win back.
target_compile_options(as_test_support PRIVATE $<$<CONFIG:Release>:-O1>
  $<$<AND:$<CONFIG:Release>,$<CXX_COMPILER_ID:GNU>>:-finline-small-functions>)

set(as_test_properties TIMEOUT 600)
set(as_test_filter "")
if(CMAKE_CROSSCOMPILING)
  # qemu-user is many times slower, keeps a record for every page of a reserved region, and does not
  # know which pages are resident, limits of address space, or how to run a test anew. So: a small
  # region, only small batches, no soak, no simulated device, and no test of these.
  set(as_test_properties TIMEOUT 3600 ENVIRONMENT BFC_MEM_RATIO=0.05)
  set(as_test_filter TEST_FILTER
      "-*InCrowdsOf64*:*DeathTest.*:*OnEveryTable*:*SoakTest*:*DecoderDeviceTest*:SimDevice*:BfcRegionTest.*:EngineTest.StartingAndStoppingLeaksNothing")
endif()

function(as_add_test name label layers)
  add_executable(${name} ${ARGN})
  list(TRANSFORM layers PREPEND "as_")
  list(REVERSE layers)
  target_include_directories(${name} PRIVATE "${as_tests_root}" "${as_generated}")
  target_link_libraries(${name} PRIVATE as_test_support ${layers} as_proto GTest::gtest GTest::gtest_main)
  # The layers' code is what is tested. The code of the tests need not be fast, and this compiles
  # faster.
  target_compile_options(${name} PRIVATE $<$<CONFIG:Release>:-O1>)
  if(label STREQUAL slow)
    set(as_test_properties TIMEOUT 7200)  # the soak runs for ALLSPARK_SOAK_SECONDS
  endif()
  gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}"
    ${as_test_filter} PROPERTIES LABELS ${label} ${as_test_properties})
  # Once more on a device whose memory the host cannot touch (tests/support/sim_device.h), but for
  # what is about the CPU alone: its tables, how it splits work, and the heap and region of its
  # steps; and for profiles by themselves.
  if(name MATCHES "^test_(engine(_slow)?|ops)$" AND NOT CMAKE_CROSSCOMPILING)
    gtest_discover_tests(${name} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
      WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}"
      TEST_PREFIX sim. TEST_LIST ${name}_on_sim
      TEST_FILTER "-*OnEveryTable*:*Emulated*:*MemoryFault*:*AllocationTest*:*DeathTest*:SplitLinearTest.*:OpProfileTest.*"
      PROPERTIES LABELS ${label} ${as_test_properties} ENVIRONMENT ALLSPARK_TEST_DEVICE=sim)
  endif()
endfunction()

# A folder that is not named as a layer tests all layers.
function(as_layers_up_to folder result)
  set(up_to "")
  foreach(layer IN LISTS ALLSPARK_LAYERS)
    list(APPEND up_to "${layer}")
    if(layer STREQUAL folder)
      break()
    endif()
  endforeach()
  set(${result} "${up_to}" PARENT_SCOPE)
endfunction()

file(GLOB_RECURSE as_test_sources CONFIGURE_DEPENDS RELATIVE "${as_tests_root}/cpp"
     "${as_tests_root}/cpp/*_test.cc")
set(as_folders "")
foreach(as_source IN LISTS as_test_sources)
  string(REGEX REPLACE "/.*" "" as_folder "${as_source}")
  list(APPEND as_folders "${as_folder}")
endforeach()
list(REMOVE_DUPLICATES as_folders)

foreach(as_folder IN LISTS as_folders)
  set(as_sources ${as_test_sources})
  list(FILTER as_sources INCLUDE REGEX "^${as_folder}/")
  list(TRANSFORM as_sources PREPEND "${as_tests_root}/cpp/")
  set(as_slow_sources ${as_sources})
  list(FILTER as_slow_sources INCLUDE REGEX "_slow_test\\.cc$")
  list(FILTER as_sources EXCLUDE REGEX "_slow_test\\.cc$")
  as_layers_up_to("${as_folder}" as_test_layers)
  if(as_sources)
    as_add_test(test_${as_folder} unit "${as_test_layers}" ${as_sources})
  endif()
  if(as_slow_sources)
    as_add_test(test_${as_folder}_slow slow "${as_test_layers}" ${as_slow_sources})
  endif()
endforeach()
