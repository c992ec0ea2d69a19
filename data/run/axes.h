/*
The axes along which the ranks of a run are numbered:

      tensor    splits each layer                 fastest: adjacent rank numbers, so on the same machine
      context   splits each sequence
      shard     splits the state that ZeRO shards
      replica   repeats the shard group
      pipeline  has other layers                  slowest

A group is a set of axes: its ranks differ along these axes and agree along all others. Code that numbers
ranks or prints positions loops over the axes, so a new axis is one more row here.
*/
#pragma once

#include <array>
#include <initializer_list>
#include <vector>

enum class Axis { tensor, context, shard, replica, pipeline };  // fastest first
inline constexpr std::array axis_names = {"tensor", "context", "shard", "replica", "pipeline"};
constexpr int axis_count = axis_names.size();
inline constexpr auto every_axis = [] {
    std::array<Axis, axis_count> axes;
    for (int axis = 0; axis < axis_count; axis++) axes[(size_t)axis] = (Axis)axis;
    return axes;
}();

class AxisSet {
public:
    constexpr AxisSet() = default;
    constexpr AxisSet(Axis axis) : bits_(1 << (int)axis) {}
    constexpr AxisSet(std::initializer_list<Axis> axes) {
        for (Axis axis : axes) bits_ |= 1 << (int)axis;
    }
    constexpr explicit AxisSet(int bits) : bits_(bits) {}

    constexpr bool has(Axis axis) const { return bits_ >> (int)axis & 1; }
    constexpr int bits() const { return bits_; }
    constexpr AxisSet operator|(const AxisSet& more) const { return AxisSet(bits_ | more.bits_); }
    constexpr AxisSet without(Axis axis) const { return AxisSet(bits_ & ~(1 << (int)axis)); }
    constexpr bool operator==(const AxisSet&) const = default;

private:
    int bits_ = 0;
};
inline constexpr AxisSet all_axes((1 << axis_count) - 1);

// One number per axis: the number of ranks along it, or the position of a rank on it.
struct PerAxis {
    std::array<int, axis_count> of = {};

    int& operator[](Axis axis) { return of[(size_t)axis]; }
    int operator[](Axis axis) const { return of[(size_t)axis]; }
    bool operator==(const PerAxis&) const = default;
    PerAxis with(Axis axis, int number) const {
        PerAxis changed = *this;
        changed[axis] = number;
        return changed;
    }
};

inline constexpr PerAxis one_along_each = [] {
    PerAxis ones;
    ones.of.fill(1);
    return ones;
}();

// Returns the size of a group along `axes`: the number of ranks that differ only along these.
inline int size_along(AxisSet axes, const PerAxis& sizes) {
    int size = 1;
    for (Axis axis : every_axis) size *= axes.has(axis) ? sizes[axis] : 1;
    return size;
}

// Returns the index of the rank at `position` within its group along `axes`; the fastest of these axes has
// stride 1.
inline int index_along(AxisSet axes, const PerAxis& position, const PerAxis& sizes) {
    int index = 0, stride = 1;
    for (Axis axis : every_axis) {
        if (!axes.has(axis)) continue;
        index += position[axis] * stride;
        stride *= sizes[axis];
    }
    return index;
}

// Returns the position of rank `index` of the group along `axes` that contains `position`.
inline PerAxis moved_along(AxisSet axes, int index, PerAxis position, const PerAxis& sizes) {
    for (Axis axis : every_axis) {
        if (!axes.has(axis)) continue;
        position[axis] = index % sizes[axis];
        index /= sizes[axis];
    }
    return position;
}

inline PerAxis position_of(int rank, const PerAxis& sizes) {
    return moved_along(all_axes, rank, {}, sizes);
}
inline int rank_of(const PerAxis& position, const PerAxis& sizes) {
    return index_along(all_axes, position, sizes);
}

// Returns the members of the group of `rank` along `axes`, in order.
inline std::vector<int> group_of(int rank, AxisSet axes, const PerAxis& sizes) {
    const PerAxis here = position_of(rank, sizes);
    std::vector<int> members((size_t)size_along(axes, sizes));
    for (size_t i = 0; i < members.size(); i++)
        members[i] = rank_of(moved_along(axes, (int)i, here, sizes), sizes);
    return members;
}
