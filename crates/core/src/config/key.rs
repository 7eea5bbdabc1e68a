//! What a key is: its kind of value, default, and whether its feature exists.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{ConfigError, pipeline};
use crate::topology::Placement;

/// The values that a key takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ValueKind {
    /// True or false.
    Boolean,
    /// True, false, or one of these words.
    FlagOr(&'static [&'static str]),
    /// A whole number within these ends.
    Integer(u64, u64),
    /// A whole number of things, also written `5e8`.
    Count(u64),
    /// A number within these ends.
    Number(f64, f64),
    /// A number of seconds that clocks can add, and that is not lost among them.
    Duration,
    /// Some of these words, with commas between them.
    Words(&'static [&'static str]),
    /// One of these words.
    Choice(&'static [&'static str]),
    /// The name of a schedule, a list of starts, or a program.
    Schedule,
    /// Text that is not empty.
    Text,
    /// An IP address.
    Address,
    /// `cluster`, `spread`, or a permutation of D, P, T.
    Placement,
}

/// The value of a key that is true, false, or a word which says how.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum FlagOrWord {
    /// True or false.
    Flag(bool),
    /// How.
    Word(String),
}

/// The value of a key that is not given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DefaultValue {
    /// No value; the key may be given as null.
    Nothing,
    /// True or false.
    Boolean(bool),
    /// A whole number.
    Integer(u64),
    /// A number.
    Number(f64),
    /// A word.
    Word(&'static str),
    /// Depends on other keys, in these words; null leaves it to them.
    Derived(&'static str),
}

/// Who defined a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The interface this library implements, for every framework.
    Common,
    /// The interface this library implements, for TensorFlow only.
    TensorFlow,
    /// The interface this library implements, for PyTorch.
    PyTorch,
    /// This library.
    Shardwright,
}

impl Origin {
    /// One word for tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Common => "common",
            Self::TensorFlow => "TensorFlow",
            Self::PyTorch => "PyTorch",
            Self::Shardwright => "Shardwright",
        }
    }
}

/// A configuration key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConfigKey {
    /// Its name.
    pub name: &'static str,
    /// Its values.
    pub kind: ValueKind,
    /// Its value when it is not given.
    pub default: DefaultValue,
    /// The unit of its value; empty where there is none.
    pub unit: &'static str,
    /// What it does.
    pub meaning: &'static str,
    /// Who defined it.
    pub origin: Origin,
    /// Why only the default is allowed, where that is so.
    pub not_built: Option<&'static str>,
    /// Whether ranks may have different values.
    pub per_rank: bool,
}

impl ConfigKey {
    pub(super) const fn new(
        origin: Origin,
        name: &'static str,
        kind: ValueKind,
        default: DefaultValue,
        unit: &'static str,
        meaning: &'static str,
    ) -> Self {
        Self {
            name,
            kind,
            default,
            unit,
            meaning,
            origin,
            not_built: None,
            per_rank: false,
        }
    }

    pub(super) const fn not_built(mut self, reason: &'static str) -> Self {
        self.not_built = Some(reason);
        self
    }

    pub(super) const fn per_rank(mut self) -> Self {
        self.per_rank = true;
        self
    }

    /// What the key allows, in words.
    pub fn allowed(&self) -> String {
        let values = match self.kind {
            ValueKind::Boolean => "true or false".to_owned(),
            ValueKind::FlagOr(words) => format!("true or false or {}", quoted(words)),
            ValueKind::Count(least) => format!("an integer of {least} or more"),
            ValueKind::Integer(least, most) if most >= u64::from(u32::MAX) => {
                format!("an integer of {least} or more")
            }
            ValueKind::Integer(least, most) => format!("an integer from {least} to {most}"),
            ValueKind::Number(least, most) => format!("a number from {least} to {most}"),
            ValueKind::Duration => format!("a number from {SHORTEST} to {LONGEST}"),
            ValueKind::Words(words) => {
                format!("one or more of {}, in one text with commas", quoted(words))
            }
            ValueKind::Choice(words) => quoted(words),
            ValueKind::Schedule => format!(
                "{}, a list of [microbatch, \"forward\" or \"backward\"], or the path of a program",
                quoted(&pipeline::words())
            ),
            ValueKind::Text => "text".to_owned(),
            ValueKind::Address => "an IP address".to_owned(),
            ValueKind::Placement => {
                "\"cluster\", \"spread\", or a permutation of the letters D, P, T".to_owned()
            }
        };
        if self.allows_null() {
            format!("{values}, or null")
        } else {
            values
        }
    }

    const fn allows_null(&self) -> bool {
        matches!(
            self.default,
            DefaultValue::Nothing | DefaultValue::Derived(_)
        )
    }

    /// The default as JSON; null where it depends on other keys.
    pub fn default_json(&self) -> Value {
        match self.default {
            DefaultValue::Nothing | DefaultValue::Derived(_) => Value::Null,
            DefaultValue::Boolean(value) => json!(value),
            DefaultValue::Integer(value) => json!(value),
            DefaultValue::Number(value) => json!(value),
            DefaultValue::Word(value) => json!(value),
        }
    }

    /// The value in its one form (a count written `5e8` becomes an integer), or why it is refused.
    pub(super) fn check(&self, value: &Value) -> Result<Value, ConfigError> {
        let refused = || ConfigError::NotAllowed {
            key: self.name,
            value: shortened(&value.to_string()),
            allowed: self.allowed(),
        };
        let checked = self.canonical(value).ok_or_else(refused)?;
        match self.not_built {
            Some(reason) if checked != self.default_json() => Err(ConfigError::NotBuilt {
                key: self.name,
                value: shortened(&value.to_string()),
                reason,
                default: self.default_json().to_string(),
            }),
            _ => Ok(checked),
        }
    }

    fn canonical(&self, value: &Value) -> Option<Value> {
        if value.is_null() {
            return self.allows_null().then_some(Value::Null);
        }
        match self.kind {
            ValueKind::Boolean => value.as_bool().map(Value::from),
            ValueKind::FlagOr(words) => value
                .as_bool()
                .map(Value::from)
                .or_else(|| text(value, |text| words.contains(&text))),
            ValueKind::Integer(least, most) => value
                .as_u64()
                .filter(|number| (least..=most).contains(number))
                .map(Value::from),
            ValueKind::Count(least) => count(value)
                .filter(|&number| number >= least)
                .map(Value::from),
            ValueKind::Number(least, most) => value
                .as_f64()
                .filter(|number| (least..=most).contains(number))
                .map(Value::from),
            ValueKind::Duration => value
                .as_f64()
                .filter(|number| (SHORTEST..=LONGEST).contains(number))
                .map(Value::from),
            ValueKind::Words(words) => text(value, |text| {
                text.split(',').all(|one| words.contains(&one.trim()))
            }),
            ValueKind::Choice(words) => text(value, |text| words.contains(&text)),
            ValueKind::Schedule => pipeline::has_form(value).then(|| value.clone()),
            ValueKind::Text => text(value, |text| !text.is_empty()),
            ValueKind::Address => text(value, |text| text.parse::<IpAddr>().is_ok()),
            ValueKind::Placement => text(value, |text| text.parse::<Placement>().is_ok()),
        }
    }
}

/// The bounds of a duration, in seconds.
const SHORTEST: f64 = 0.001;
const LONGEST: f64 = 1e9;

/// The most characters of a value in an error.
const MOST_SHOWN: usize = 200;

/// A value's text, cut where it is long.
pub(super) fn shortened(text: &str) -> String {
    match text.char_indices().nth(MOST_SHOWN) {
        Some((end, _)) => format!("{}... ({} characters)", &text[..end], text.chars().count()),
        None => text.to_owned(),
    }
}

fn quoted(words: &[&str]) -> String {
    let words: Vec<_> = words.iter().map(|word| format!("{word:?}")).collect();
    words.join(" or ")
}

fn text(value: &Value, allowed: impl Fn(&str) -> bool) -> Option<Value> {
    value.as_str().filter(|text| allowed(text)).map(Value::from)
}

/// Above this, a float no longer holds every whole number.
const LARGEST_EXACT_COUNT: f64 = 9_007_199_254_740_992.0;

fn count(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let number = value.as_f64()?;
        let whole = number.fract() == 0.0 && (0.0..=LARGEST_EXACT_COUNT).contains(&number);
        #[expect(
            clippy::cast_sign_loss,
            reason = "checked to be a whole number of 0 or more"
        )]
        whole.then_some(number as u64)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    fn refused(key: &str, value: &Value) -> String {
        Config::parse(&json!({ key: value }).to_string())
            .expect_err("to be refused")
            .to_string()
    }

    #[test]
    fn durations_are_those_that_clocks_can_add() {
        for value in [0.001, 1.0, 1e9] {
            assert!(Config::parse(&json!({"stall_report_seconds": value}).to_string()).is_ok());
        }
        for value in [
            -1.0,
            0.0,
            1e-320,
            0.0009,
            1.01e9,
            18_446_744_073_709_551_616.0,
            1e30,
            1e308,
        ] {
            let text = refused("stall_report_seconds", &json!(value));
            let allowed = "; allowed: a number from 0.001 to 1000000000";
            assert!(
                text.starts_with("the configuration key \"stall_report_seconds\" is "),
                "{text}"
            );
            assert!(text.ends_with(allowed), "{text}");
        }
    }

    #[test]
    fn long_values_are_cut_in_errors() {
        let long = "\u{e9}".repeat(100_000);
        let cut = format!("\"{}... (100002 characters)", "\u{e9}".repeat(199));
        assert_eq!(
            refused("microbatches", &json!(long)),
            format!(
                "the configuration key \"microbatches\" is {cut}; allowed: an integer of 1 or more"
            )
        );
        assert!(refused("nonsense", &json!(long)).contains(&cut));
        assert!(refused(&long, &json!(1)).len() < 1000);
    }
}
