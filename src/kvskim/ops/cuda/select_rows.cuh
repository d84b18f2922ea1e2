// Which pages of a warp are selected, and writing them as a page table.
#pragma once

#include "select_cluster.cuh"

namespace kvskim::selection {

constexpr int PAGES_PER_BLOCK = 32768;

// A bit for each page of a warp, spread over its lanes: bit b of lane l is page 32 l + b, then come another 1024 pages.
struct Rows {
    static constexpr int PARTS = PAGES_PER_BLOCK / WARPS / 1024;
    uint32_t bits[PARTS] = {};

    __device__ static int index(int part, int lane, int bit) { return part * 1024 + lane * 32 + bit; }

    // How many bits this lane has.
    __device__ __forceinline__ int count() const {
        int sum = 0;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) sum += __popc(bits[part]);
        return sum;
    }

    // The bits of one row of 32 pages, which all lanes know.
    __device__ __forceinline__ void keep(int row, uint32_t of_row) {
        const int mine = row - static_cast<int>(threadIdx.x % 32);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) bits[part] = mine == 32 * part ? of_row : bits[part];
    }
};

struct Selection {
    Rows rows;
    int before;  // selected pages of this and other blocks that lie before the pages of this warp
    int count;   // selected pages in all
    float mass;  // of all selected pages; in the first warp
};

// Writes the selected pages of this warp, of which the first has index first_page, behind those before it. table: behind the sink.
template <typename Visit>
__device__ __forceinline__ void write_rows(const Selection& selection, int* table, int first_page, const Visit& visit) {
    const int lane = threadIdx.x % 32;
    int position = selection.before;
#pragma unroll
    for (int part = 0; part < Rows::PARTS; ++part) {
        uint32_t left = selection.rows.bits[part];
        if (!__any_sync(0xffffffffu, left != 0)) continue;
        const int own = __popc(left);
        int upto = own;
#pragma unroll
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(0xffffffffu, upto, distance);
            if (lane >= distance) upto += other;
        }
#pragma unroll 1
        for (int* to = table + position + upto - own; left; left &= left - 1) {
            const int index = Rows::index(part, lane, __ffs(static_cast<int>(left)) - 1);
            *to++ = first_page + index;
            visit(index);
        }
        position += __shfl_sync(0xffffffffu, upto, 31);
    }
}

}  // namespace kvskim::selection
