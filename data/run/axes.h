/*
The axes that the ranks of a run are numbered along:

      tensor    shares each layer                 fastest: neighbours in number, so in the same machine
      shard     shares the state that ZeRO cuts
      replica   repeats the shard group
      pipeline  has other layers                  slowest

A group is a set of axes: its ranks differ in these, and agree in all others. Code that numbers ranks, or
shows where one is, loops over the axes: another axis is another row here.
*/
#pragma once

#include <array>
#include <initializer_list>
#include <vector>

enum class Axis { tensor, shard, replica, pipeline };  // the fastest first
inline constexpr std::array axis_names = {"tensor", "shard", "replica", "pipeline"};
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

// A number for each axis: how many ranks lie along it, or which of these a rank is.
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

// Ranks that differ in these axes alone: a line of so many.
inline int size_along(AxisSet axes, const PerAxis& sizes) {
    int size = 1;
    for (Axis axis : every_axis) size *= axes.has(axis) ? sizes[axis] : 1;
    return size;
}

// Which rank of such a line is at this position, counted along the fastest axis first.
inline int index_along(AxisSet axes, const PerAxis& position, const PerAxis& sizes) {
    int index = 0, stride = 1;
    for (Axis axis : every_axis) {
        if (!axes.has(axis)) continue;
        index += position[axis] * stride;
        stride *= sizes[axis];
    }
    return index;
}

// The position of rank number `index` of the line through `position`.
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

// The members of the group of `rank` that runs along `axes`, in order.
inline std::vector<int> group_of(int rank, AxisSet axes, const PerAxis& sizes) {
    const PerAxis here = position_of(rank, sizes);
    std::vector<int> members((size_t)size_along(axes, sizes));
    for (size_t i = 0; i < members.size(); i++)
        members[i] = rank_of(moved_along(axes, (int)i, here, sizes), sizes);
    return members;
}
