#include "services/router/fleet/snapshot.h"

#include <algorithm>

namespace spl::router {
namespace {

std::vector<std::string> HeadMapOf(const v1::ModelIdentity& model) {
  const std::string& heads = model.global_heads();
  std::vector<std::string> map;
  if (model.num_kv_heads() == 0 || heads.size() % model.num_kv_heads() != 0) return map;
  for (size_t at = 0; at < heads.size(); at += model.num_kv_heads()) {
    std::string& layer = map.emplace_back();
    for (size_t h = at; h < at + model.num_kv_heads(); ++h) layer += heads[h] != 0 ? 'g' : 'l';
  }
  return map;
}

}  // namespace

FleetModel FleetModelOf(const v1::ModelIdentity& identity) {
  FleetModel model;
  if (identity.fingerprint().size() != model.fingerprint.size()) return model;
  model.known = true;
  model.name = identity.name();
  std::copy(identity.fingerprint().begin(), identity.fingerprint().end(), model.fingerprint.begin());
  model.layout_digest = identity.layout_digest();
  model.max_context = identity.max_context();
  model.vocab_size = identity.vocab_size();
  model.default_reuse = identity.default_reuse();
  model.default_reuse_tokens = identity.default_reuse_tokens();
  model.default_reuse_longer = identity.default_reuse_longer();
  model.weights = identity.weights();
  model.kv_dtype = identity.kv_dtype();
  model.fp8_activation_rows = identity.fp8_activation_rows();
  model.head_map = HeadMapOf(identity);
  return model;
}

}  // namespace spl::router
