# Compiler launcher, linker, warnings, sanitizers: everything that is a property of the tools, not of a target.
find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
endif()
find_program(MOLD_PROGRAM mold)
if(MOLD_PROGRAM)
  add_link_options(-fuse-ld=mold)
endif()

# -O2 -g1: line tables are enough for a useful stack trace and halve the link.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1")
set(SPLICE_WARNINGS -Wall -Wextra -Werror -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  list(APPEND SPLICE_WARNINGS -Wno-restrict) # false alarms of g++ 12 on "x" + std::string
endif()

if(SPLICE_SANITIZE)
  add_compile_options(-fsanitize=${SPLICE_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${SPLICE_SANITIZE})
  if(SPLICE_SANITIZE MATCHES "undefined")
    add_compile_options(-fno-sanitize-recover=undefined)
  endif()
endif()
if(SPLICE_BUILD_FUZZ)
  add_compile_options(-fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined)
  add_link_options(-fsanitize=address,undefined)
endif()
