// The one order in which parts are added: a binary tree that pairs neighbours level by level, (0+1), (2+3),
// ...; an odd one out moves up as it is. Used for the leaves of a step and the ranks of a run.
#pragma once

// Nodes are kept until their right neighbour is there, one a level.
constexpr unsigned tree_levels = 11;
constexpr unsigned tree_max_parts = (1u << tree_levels) - 1;

// The sum of part(0), ..., part(count - 1) in that order, for count in 1..tree_max_parts. A left node whose
// number is odd at some level completes a pair there, like a carry in binary addition.
template <typename Value, typename Part>
constexpr Value tree_fold(unsigned count, const Part& part) {
    Value kept[tree_levels];
    Value sum = part(0);
    for (unsigned index = 0; index < count; index++) {
        if (index > 0) sum = part(index);
        // Until it is kept itself. The last one takes in all that is kept: no neighbour will come.
        bool moves = true;
#ifdef __CUDA_ARCH__
#pragma unroll  // without a break, so that what is kept stays in registers
#endif
        for (unsigned level = 0; level < tree_levels; level++) {
            const bool pairs = (index >> level & 1) != 0;
            if (moves && pairs) sum = kept[level] + sum;
            if (moves && !pairs && index + 1 < count) {
                kept[level] = sum;
                moves = false;
            }
        }
    }
    return sum;
}
