# The helpers every folder builds with: splice_proto_library, splice_library, splice_program, splice_test, splice_bench,
# splice_fuzz. Sources are explicit; nothing is globbed.

# One protoc run per file; works for nested folders, which CMake's protobuf_generate does not.
function(splice_proto_library target) # ROOT <import dir> PROTOS a/b.proto ...
  cmake_parse_arguments(P "" "ROOT" "PROTOS" ${ARGN})
  set(out ${CMAKE_CURRENT_BINARY_DIR}/${target}_gen)
  file(MAKE_DIRECTORY ${out})
  set(depends)
  foreach(p ${P_PROTOS})
    list(APPEND depends ${P_ROOT}/${p})
  endforeach()
  foreach(p ${P_PROTOS})
    string(REGEX REPLACE "\\.proto$" "" stem ${p})
    set(o ${out}/${stem}.pb.cc ${out}/${stem}.pb.h ${out}/${stem}.grpc.pb.cc ${out}/${stem}.grpc.pb.h)
    add_custom_command(OUTPUT ${o}
      COMMAND protobuf::protoc -I ${P_ROOT} --cpp_out=${out} --grpc_out=${out}
              --plugin=protoc-gen-grpc=$<TARGET_FILE:gRPC::grpc_cpp_plugin> ${p}
      DEPENDS ${depends} protobuf::protoc gRPC::grpc_cpp_plugin VERBATIM)
    list(APPEND gen ${o})
  endforeach()
  add_library(${target} STATIC ${gen})
  target_include_directories(${target} SYSTEM PUBLIC ${out})
  target_link_libraries(${target} PUBLIC protobuf::libprotobuf gRPC::grpc++)
endfunction()

function(splice_library target) # SRCS ... DEPS (public) ... PRIVATE_DEPS ...
  cmake_parse_arguments(P "" "" "SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  add_library(${target} STATIC ${P_SRCS})
  target_compile_options(${target} PRIVATE ${SPLICE_WARNINGS})
  target_link_libraries(${target} PUBLIC ${P_DEPS} PRIVATE ${P_PRIVATE_DEPS})
endfunction()

# DT_RPATH, so that it also holds for what the libraries need: a bundle's lib/ lies beside its bin/.
function(splice_program_rpath target)
  set_target_properties(${target} PROPERTIES BUILD_RPATH "$ORIGIN/../lib")
  target_link_options(${target} PRIVATE -Wl,--disable-new-dtags)
endfunction()

function(splice_program target) # SRCS ... DEPS ...   lands in build/bin
  cmake_parse_arguments(P "" "" "SRCS;DEPS" ${ARGN})
  add_executable(${target} ${P_SRCS})
  target_compile_options(${target} PRIVATE ${SPLICE_WARNINGS})
  target_link_libraries(${target} PRIVATE ${P_DEPS})
  splice_program_rpath(${target})
  add_dependencies(${target} splice_plugins)
endfunction()

# LABEL is unit (default), cluster or slow; but for unit tests, each has the machine for itself. Tests run from the
# source root, so that models/ and ../shared resolve.
function(splice_test target) # SRCS ... DEPS ... [LABEL l] [TIMEOUT s] [ALONE]: no other test beside it
  cmake_parse_arguments(P "ALONE" "LABEL;TIMEOUT" "SRCS;DEPS" ${ARGN})
  if(NOT SPLICE_BUILD_TESTS)
    return()
  endif()
  if(NOT P_LABEL)
    set(P_LABEL unit)
  endif()
  if(NOT P_TIMEOUT)
    set(P_TIMEOUT 240) # slow machines, two tests at a time
  endif()
  if(SPLICE_SANITIZE)
    math(EXPR P_TIMEOUT "${P_TIMEOUT} * 8") # sanitized code is several times slower
  endif()
  add_executable(${target} ${P_SRCS})
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  # The tests' own code is half of all compiling and not what takes their time: a third less at -O1.
  target_compile_options(${target} PRIVATE ${SPLICE_WARNINGS} $<$<COMPILE_LANGUAGE:CXX>:-O1>)
  target_link_libraries(${target} PRIVATE ${P_DEPS} GTest::gmock spl_test_main)
  splice_program_rpath(${target})
  add_dependencies(${target} splice_plugins)
  add_test(NAME ${target} COMMAND ${target} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  set_tests_properties(${target} PROPERTIES LABELS ${P_LABEL} TIMEOUT ${P_TIMEOUT})
  if(P_ALONE OR NOT P_LABEL STREQUAL unit)
    set_tests_properties(${target} PROPERTIES RUN_SERIAL ON)
  endif()
endfunction()

# Runs a test of splice_test another time, under NAME + suffix, with this environment.
function(splice_test_again target suffix environment)
  if(NOT SPLICE_BUILD_TESTS)
    return()
  endif()
  get_test_property(${target} TIMEOUT timeout)
  add_test(NAME ${target}${suffix} COMMAND ${target} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
  set_tests_properties(${target}${suffix} PROPERTIES LABELS unit TIMEOUT ${timeout} ENVIRONMENT "${environment}")
endfunction()

# Makes an executable one that lands in build/bench and is built by the target `benchmarks`, not by `all`: no test needs
# one, and they are a sixth of the compiling.
function(splice_add_benchmark target)
  if(NOT TARGET benchmarks)
    add_custom_target(benchmarks)
  endif()
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bench EXCLUDE_FROM_ALL ON)
  add_dependencies(benchmarks ${target})
endfunction()

function(splice_bench target) # SRCS ... DEPS ...   Google Benchmark; lands in build/bench
  cmake_parse_arguments(P "" "" "SRCS;DEPS" ${ARGN})
  if(NOT SPLICE_BUILD_BENCH)
    return()
  endif()
  add_executable(${target} ${P_SRCS})
  splice_add_benchmark(${target})
  target_compile_options(${target} PRIVATE ${SPLICE_WARNINGS})
  target_link_libraries(${target} PRIVATE ${P_DEPS} benchmark::benchmark)
  splice_program_rpath(${target})
  add_dependencies(${target} splice_plugins)
endfunction()

function(splice_fuzz target) # SRCS ... DEPS ...   libFuzzer; lands in build/fuzz
  cmake_parse_arguments(P "" "" "SRCS;DEPS" ${ARGN})
  if(NOT SPLICE_BUILD_FUZZ)
    return()
  endif()
  add_executable(${target} ${P_SRCS})
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/fuzz)
  target_link_options(${target} PRIVATE -fsanitize=fuzzer)
  target_link_libraries(${target} PRIVATE ${P_DEPS})
  add_dependencies(splice_fuzz_targets ${target})
endfunction()
