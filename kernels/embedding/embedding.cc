#include <string>

#include "kernels/common/status.h"
#include "kernels/embedding/embedding_validate.h"

namespace spl::kernels {

absl::Status ValidateGatherRows(const GatherRowsArgs& a) {
  if (a.num_table_rows < 0 || a.width <= 0) {
    return InvalidCall("GatherRows: table [", a.num_table_rows, ", ", a.width, "]");
  }
  if (IsQuantizedType(a.dtype)) return InvalidCall("GatherRows: a table of ", std::string(DTypeName(a.dtype)));
  if (a.ids.empty()) return absl::OkStatus();
  if (a.table == nullptr || a.out.data == nullptr) return InvalidCall("GatherRows: null tensor");
  if (a.table == a.out.data) return InvalidCall("GatherRows: out aliases table");
  for (size_t i = 0; i < a.ids.size(); ++i) {
    const int32_t id = a.last_tokens == nullptr ? a.ids[i] : a.IdOf(i);
    if (id < 0 || id >= a.num_table_rows) {
      return InvalidCall("GatherRows: id ", id, " at ", i, " is outside [0, ", a.num_table_rows, ")");
    }
  }
  return absl::OkStatus();
}

}  // namespace spl::kernels
