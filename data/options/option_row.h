/*
A row of the table of options: an option's name, limits, help and policies, and access to its value in each
struct of options that has it.
*/
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "data/options/options.h"

// The value of an option, in its own type.
using OptionValue = std::variant<int, long long, float, double, bool, Choice, Interval, std::string,
                                 std::vector<std::string>>;

// The meaning of a suffix on a number: k is 1000 in a count (tokens of a run, steps), and 1024 in the size of
// a batch or of a text; m is a minute in a time.
enum class Suffixes { none, of_count, of_size, of_time };

// The numbers that a row accepts.
struct Limits {
    double low = 0, high = 0;
    Suffixes suffixes = Suffixes::none;
};

// How an option is handled when a run is resumed (--resume) or begins with another run's weights (--init).
enum class Resume {
    overridable,        // the checkpoint's value holds unless another is given
    overridable_noted,  // like overridable, but another value is reported
    fixed,   // the checkpoint's value holds; another is refused, as it would change the meaning of the state
    shape,   // like fixed, for the shape of weights; --init takes over only these and `tokens`
    tokens,  // like overridable_noted, for how the model's text is encoded
    layout,  // the checkpoint's value holds if the cut is the same; otherwise it follows from the new cut
    not_stored  // a value applies only to this start
};

// Specifies whether the ranks of one job may have different values of an option.
enum class Ranks {
    alike,  // no: different values are refused (comm/agreement.h)
    own     // yes: a path on the rank's node, whose content is compared, or a value that others need not know
};

// An option of any type, and its place in each of the structs of options that have it.
class OptionRow {
public:
    // field(options): returns that field of a struct of options. The option belongs to the commands whose
    // structs have the field.
    template <typename Field>
    OptionRow(const char* name, Field, const char* group, Ranks ranks, Limits limits, const char* help,
              Resume resume = Resume::overridable, bool positional = false, bool later = false)
        : field(name),
          group(group),
          ranks(ranks),
          limits(limits),
          help(help),
          resume(resume),
          positional(positional),
          later(later) {
        add<Field, Options, PlanOptions, LaunchOptions, AgentOptions, SelftestOptions, TokenizeOptions,
            DataOptions, SampleOptions, EvalOptions, InspectOptions, ReportOptions, ExportOptions,
            ImportOptions>();
    }

    const char* field;
    const char* group;
    Ranks ranks;
    Limits limits;
    const char* help;
    Resume resume;
    bool positional;  // given without its name
    bool later;       // older files lack it; their models use the default

    bool belongs_to(Command command) const { return access_[command].get; }

    // The value if the option is not given.
    const OptionValue& standard(Command command) const { return *access_[command].standard; }

    // A value that shows the option's type.
    const OptionValue& example() const {
        return *std::ranges::find_if(access_, [](const Access& a) { return a.get; })->standard;
    }

    template <typename O>
    OptionValue get(const O& options) const {
        return access_[O::command].get(&options);
    }

    // value: must have the option's type
    template <typename O>
    void set(O& options, const OptionValue& value) const {
        access_[O::command].set(&options, value);
    }

private:
    struct Access {
        std::optional<OptionValue> standard;
        OptionValue (*get)(const void* options);
        void (*set)(void* options, const OptionValue& value);
    };

    template <typename Field, typename... Structs>
    void add() {
        static_assert((std::is_invocable_v<Field, Structs&> || ...), "no command has this option");
        (add_one<Field, Structs>(), ...);
    }

    template <typename Field, typename O>
    void add_one() {
        if constexpr (std::is_invocable_v<Field, O&>) {
            access_[O::command] = {
                value_of(Field()(O())),
                [](const void* options) { return value_of(Field()(*(const O*)options)); },
                [](void* options, const OptionValue& value) { assign(Field()(*(O*)options), value); }};
        }
    }

    template <typename Value>
    static OptionValue value_of(const Value& value) {
        if constexpr (std::is_enum_v<Value>)
            return Choice{(int)value, NamesOf<Value>::all};
        else
            return value;
    }

    template <typename Value>
    static void assign(Value& to, const OptionValue& value) {
        if constexpr (std::is_enum_v<Value>)
            to = (Value)std::get<Choice>(value).value;
        else
            to = std::get<Value>(value);
    }

    std::array<Access, command_count> access_ = {};
};
