// Greedy verification of draft trees.
#pragma once

#include <cstdint>

namespace specmemo {

// Per sequence the longest path from the root on which each node's token is the target's token of its parent.
void verify_tree_greedy(const int64_t* draft, const int64_t* target, const int32_t* parents, const int32_t* qo_indptr,
                        int64_t batch, int64_t max_depth, int32_t* accept_index, int32_t* accept_length,
                        int64_t* bonus_token);

}  // namespace specmemo
