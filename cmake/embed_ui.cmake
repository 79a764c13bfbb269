# Writes the files NAMES (separated by commas) of the folder DIR as bytes into the C++ source OUT, which
# services/router/http/ui_files.h declares.
string(REPLACE "," ";" names "${NAMES}")
set(arrays "")
set(rows "")
foreach(name IN LISTS names)
  file(READ ${DIR}/${name} hex HEX)
  file(SHA256 ${DIR}/${name} hash)
  string(SUBSTRING ${hash} 0 16 tag)
  string(REGEX REPLACE "(..)" "'\\\\x\\1'," hex "${hex}")
  string(MAKE_C_IDENTIFIER "k_${name}" symbol)
  string(APPEND arrays "constexpr char ${symbol}[] = {${hex}};\n")
  string(APPEND rows "    {\"${name}\", {${symbol}, sizeof ${symbol}}, \"\\\"${tag}\\\"\"},\n")
endforeach()
file(WRITE ${OUT} "#include \"services/router/http/ui_files.h\"

namespace spl::router {
namespace {

${arrays}
constexpr UiFile kFiles[] = {
${rows}};

}  // namespace

std::span<const UiFile> UiFiles() { return kFiles; }

}  // namespace spl::router
")
