# The extension module `allspark._allspark`, from csrc/python. It holds the engine itself (static
# layers), so that the package needs no liballspark.so; of the system it needs libprotobuf-lite and
# libstdc++. setup.py installs the component "python" into the package.

file(GLOB as_python_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/csrc/python/*.cc")

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
if(NOT pybind11_DIR OR NOT EXISTS "${pybind11_DIR}")
  execute_process(COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
                  OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE
                  COMMAND_ERROR_IS_FATAL ANY)
  set(pybind11_DIR "${pybind11_DIR}" CACHE PATH "pybind11's CMake package" FORCE)
endif()
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 3.0 CONFIG REQUIRED)

# NO_EXTRAS: no link-time optimisation; the hot code is in the ISA files, and linking stays fast.
pybind11_add_module(_allspark MODULE NO_EXTRAS ${as_python_sources})
target_link_libraries(_allspark PRIVATE as_engine ${CMAKE_DL_LIBS})
target_link_options(_allspark PRIVATE "LINKER:--exclude-libs,ALL")
add_dependencies(_allspark as_descriptor_set)

install(TARGETS _allspark LIBRARY DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)
install(FILES "${ALLSPARK_DESCRIPTOR_SET}" DESTINATION . COMPONENT python EXCLUDE_FROM_ALL)
