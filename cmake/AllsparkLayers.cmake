# as_add_layer(NAME DEPENDENCY...): the sources in csrc/NAME and its folders become the static library as_NAME.

set(ALLSPARK_LAYERS "")   # in order, lowest first

# Layers in which a silent loss of bits would corrupt state; they are compiled with -Wconversion.
set(ALLSPARK_CONVERSION_LAYERS weights kv_cache scheduler)

function(as_add_library name sources dependencies)
  list(TRANSFORM dependencies PREPEND "as_")
  add_library(as_${name} STATIC ${sources})
  target_link_libraries(as_${name} PUBLIC as_flags Threads::Threads ${dependencies})
  if(name IN_LIST ALLSPARK_CONVERSION_LAYERS)
    target_compile_options(as_${name} PRIVATE -Wconversion)
  endif()
  list(APPEND ALLSPARK_LAYERS "${name}")
  set(ALLSPARK_LAYERS "${ALLSPARK_LAYERS}" PARENT_SCOPE)
endfunction()

macro(as_add_layer name)
  set(as_root "${CMAKE_CURRENT_SOURCE_DIR}/csrc/${name}")
  file(GLOB as_sources CONFIGURE_DEPENDS "${as_root}/*.cc" "${as_root}/*/*.cc")
  as_add_library("${name}" "${as_sources}" "${ARGN}")
endmacro()

# Flags of one instruction set, by the suffix of the file name. No exceptions and no RTTI, because
# they pull in inline library code, which must not be compiled for a newer CPU
# (scripts/check_isa_symbols.py).
set(ALLSPARK_ISA_COMMON -O3 -fno-exceptions -fno-rtti -ffp-contract=off)
if(ALLSPARK_SANITIZE)  # AddressSanitizer at -O3 takes minutes for each of these files
  list(APPEND ALLSPARK_ISA_COMMON -O1)
endif()
set(ALLSPARK_ISA_avx2 -mavx2 -mfma -mf16c)
set(ALLSPARK_ISA_avx2_vnni ${ALLSPARK_ISA_avx2} -mavxvnni)
set(ALLSPARK_ISA_avx512
    -mavx512f -mavx512bw -mavx512vl -mavx512dq ${ALLSPARK_ISA_avx2})
set(ALLSPARK_ISA_avx512_vnni ${ALLSPARK_ISA_avx512} -mavx512vnni)
set(ALLSPARK_ISA_avx512_bf16 ${ALLSPARK_ISA_avx512_vnni} -mavx512bf16)
set(ALLSPARK_ISA_amx ${ALLSPARK_ISA_avx512_bf16} -mamx-tile -mamx-bf16 -mamx-int8)
# On Arm, GCC schedules before it allocates registers, and then spills the tiles' accumulators.
set(ALLSPARK_ISA_neon $<$<CXX_COMPILER_ID:GNU>:-fno-schedule-insns>)
set(ALLSPARK_ISA_neon_dotprod ${ALLSPARK_ISA_neon} -march=armv8.2-a+dotprod)
set(ALLSPARK_ISA_neon_bf16 ${ALLSPARK_ISA_neon} -march=armv8.2-a+bf16)
set(ALLSPARK_ISA_neon_i8mm ${ALLSPARK_ISA_neon} -march=armv8.2-a+bf16+i8mm)
set(ALLSPARK_ISAS_x86_64 avx2 avx2_vnni avx512 avx512_vnni avx512_bf16 amx)
set(ALLSPARK_ISAS_aarch64 neon neon_dotprod neon_bf16 neon_i8mm)

# kernels/, kernels/ref/ and kernels/cpu/. Each kernels_ISA.cc gets the flags of its instruction
# set; files for other processors are left out.
macro(as_add_kernels_layer)
  set(as_root "${CMAKE_CURRENT_SOURCE_DIR}/csrc/kernels")
  file(GLOB as_sources CONFIGURE_DEPENDS
       "${as_root}/*.cc" "${as_root}/ref/*.cc" "${as_root}/cpu/*.cc")
  string(TOLOWER "${CMAKE_SYSTEM_PROCESSOR}" as_processor)
  set(as_isa_sources ${as_sources})
  list(FILTER as_isa_sources INCLUDE REGEX "/cpu/kernels_[^/]*\\.cc$")
  if(as_processor STREQUAL "amd64")
    set(as_processor x86_64)
  elseif(as_processor STREQUAL "arm64")
    set(as_processor aarch64)
  endif()
  foreach(as_source IN LISTS as_isa_sources)
    string(REGEX REPLACE ".*/kernels_([^/]*)\\.cc$" "\\1" as_isa "${as_source}")
    if(NOT as_isa IN_LIST ALLSPARK_ISAS_${as_processor})
      list(REMOVE_ITEM as_sources "${as_source}")
      continue()
    endif()
    set(as_isa_flags ${ALLSPARK_ISA_COMMON} ${ALLSPARK_ISA_${as_isa}})
    if("undefined" IN_LIST ALLSPARK_SANITIZE)
      list(APPEND as_isa_flags -fno-sanitize=vptr)  # needs RTTI
    endif()
    set_source_files_properties("${as_source}" PROPERTIES COMPILE_OPTIONS "${as_isa_flags}")
  endforeach()
  as_add_library(kernels "${as_sources}" base)
endmacro()
