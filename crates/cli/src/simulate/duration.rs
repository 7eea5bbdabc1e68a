//! Times on the command line.

use std::time::Duration;

/// A time that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is no time; allowed are whole nanoseconds, or a whole number with one of the units ns, us, ms and s"
)]
pub(crate) struct NoDuration {
    text: String,
}

const UNITS: [(&str, u64); 4] = [
    ("ns", 1),
    ("us", 1_000),
    ("ms", 1_000_000),
    ("s", 1_000_000_000),
];

/// Reads `1500`, `5us` or `40ms`.
pub(crate) fn parse(text: &str) -> Result<Duration, NoDuration> {
    let at = text
        .find(|character: char| !character.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, unit) = text.split_at(at);
    let unit = match unit {
        "" => Some(1),
        unit => UNITS
            .iter()
            .find(|(name, _)| *name == unit)
            .map(|(_, unit)| *unit),
    };
    let number = digits.parse::<u64>().ok();
    number
        .zip(unit)
        .and_then(|(number, unit)| number.checked_mul(unit))
        .map(Duration::from_nanos)
        .ok_or_else(|| NoDuration {
            text: text.to_owned(),
        })
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn times_have_units_or_are_nanoseconds() {
        let nanoseconds = |text| parse(text).map(|time| time.as_nanos());
        assert_eq!(nanoseconds("1500"), Ok(1500));
        assert_eq!(nanoseconds("7ns"), Ok(7));
        assert_eq!(nanoseconds("5us"), Ok(5_000));
        assert_eq!(nanoseconds("40ms"), Ok(40_000_000));
        assert_eq!(nanoseconds("2s"), Ok(2_000_000_000));
    }

    #[test]
    fn other_texts_are_named() {
        for text in ["", "ms", "-1", "1.5ms", "4 ms", "3h", "99999999999s"] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }
}
