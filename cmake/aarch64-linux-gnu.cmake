# Builds for 64-bit Arm with Debian's cross compiler (g++-aarch64-linux-gnu), and runs the result in
# qemu-aarch64 (qemu-user). The libraries of that architecture are in build/aarch64-root
# (scripts/setup.sh --native unpacks them there); protoc is the build machine's.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)

set(as_aarch64_root "${CMAKE_CURRENT_LIST_DIR}/../build/aarch64-root")
set(CMAKE_FIND_ROOT_PATH "${as_aarch64_root}" /usr/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)

# -L: where the program's own libraries are searched; the others are found by the rpath of the
# build.
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
