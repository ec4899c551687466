# liballspark.so, the library that C++ programs link. It has all layers, and exports what the public
# headers declare. The version script hides what visibility cannot: inline code of the standard
# library and of protobuf.

set(as_objects "")
foreach(as_layer IN LISTS ALLSPARK_LAYERS ITEMS proto)
  list(APPEND as_objects "$<TARGET_OBJECTS:as_${as_layer}>")
endforeach()

set(as_version_script "${CMAKE_CURRENT_SOURCE_DIR}/cmake/allspark.map")
add_library(allspark SHARED ${as_objects})
add_library(allspark::allspark ALIAS allspark)
set_target_properties(allspark PROPERTIES
  LINKER_LANGUAGE CXX VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR}
  LINK_DEPENDS "${as_version_script}")
target_compile_features(allspark INTERFACE cxx_std_20)
target_include_directories(allspark INTERFACE
  "$<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}/csrc/include>"
  "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
target_link_libraries(allspark PRIVATE protobuf::libprotobuf-lite Threads::Threads ${CMAKE_DL_LIBS})
target_link_options(allspark PRIVATE "LINKER:--version-script=${as_version_script}")
if(NOT ALLSPARK_SANITIZE AND NOT ALLSPARK_FUZZ)
  target_link_options(allspark PRIVATE "LINKER:--no-undefined")
endif()

install(TARGETS allspark EXPORT allspark-targets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY csrc/include/allspark DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        FILES_MATCHING PATTERN "*.h")
# The messages that model_serializer.h takes and returns as bytes.
install(FILES csrc/proto/allspark.proto DESTINATION ${CMAKE_INSTALL_DATADIR}/allspark)
set(as_package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/allspark")
install(EXPORT allspark-targets NAMESPACE allspark:: DESTINATION ${as_package_dir})
include(CMakePackageConfigHelpers)
configure_package_config_file(cmake/allspark-config.cmake.in
  "${CMAKE_CURRENT_BINARY_DIR}/allspark-config.cmake" INSTALL_DESTINATION ${as_package_dir})
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/allspark-config-version.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/allspark-config.cmake"
              "${CMAKE_CURRENT_BINARY_DIR}/allspark-config-version.cmake"
        DESTINATION ${as_package_dir})
