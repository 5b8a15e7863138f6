#include "verify.h"

namespace specmemo {

void verify_tree_greedy(const int64_t* draft, const int64_t* target, const int32_t* parents, const int32_t* qo_indptr,
                        int64_t batch, int64_t max_depth, int32_t* accept_index, int32_t* accept_length,
                        int64_t* bonus_token) {
  const int64_t width = max_depth + 1;
  for (int64_t s = 0; s < batch; ++s) {
    const int64_t first = qo_indptr[s], nodes = qo_indptr[s + 1] - first;
    int32_t* path = accept_index + s * width;
    for (int64_t i = 0; i < width; ++i) path[i] = -1;
    accept_length[s] = -1;
    bonus_token[s] = -1;
    if (nodes == 0) continue;
    int64_t node = 0, length = 0;
    path[0] = 0;
    while (length < max_depth) {
      int64_t child = node + 1;  // parents come before their children
      while (child < nodes && !(parents[first + child] == node && draft[first + child] >= 0 &&
                                draft[first + child] == target[first + node]))
        ++child;
      if (child == nodes) break;
      node = child;
      path[++length] = static_cast<int32_t>(node);
    }
    accept_length[s] = static_cast<int32_t>(length);
    bonus_token[s] = target[first + node];
  }
}

}  // namespace specmemo
