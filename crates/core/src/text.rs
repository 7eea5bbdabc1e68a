//! Foreign text in errors: what files, stores, arguments and other processes say, of any length and with any characters.

/// The most characters of an error's text.
const MOST: usize = 4000;

/// Text that is told in an error: its beginning and its end if it is long.
pub fn bounded(text: &str) -> String {
    bounded_to(text, MOST)
}

/// Text that is told in an error, on one line: without what would make it several, or move a terminal's cursor.
pub fn one_line(text: &str) -> String {
    one_line_to(text, MOST)
}

/// [`one_line`] with another limit.
pub fn one_line_to(text: &str, most: usize) -> String {
    let shown: String = bounded_to(text.trim_end(), most)
        .chars()
        .map(visible)
        .collect();
    shown
}

fn bounded_to(text: &str, most: usize) -> String {
    let count = text.chars().count();
    if count <= most {
        return text.to_owned();
    }
    let end = most / 3;
    let beginning: String = text.chars().take(most - end).collect();
    let ending: String = text.chars().skip(count - end).collect();
    format!("{beginning}... ({count} characters) ...{ending}")
}

fn visible(character: char) -> char {
    match character {
        '\n' | '\r' | '\t' => ' ',
        control if control.is_control() => '\u{fffd}',
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{MOST, bounded, one_line, one_line_to};

    #[test]
    fn long_text_keeps_its_beginning_and_its_end() {
        let text = format!("cannot read {}: it is gone", "x".repeat(100_000));
        let told = bounded(&text);
        assert!(told.starts_with("cannot read x"), "{told}");
        assert!(told.ends_with("x: it is gone"), "{told}");
        assert!(told.contains("... (100024 characters) ..."), "{told}");
        assert_eq!(one_line_to("a\nb\u{1b}[2J\n", 9), "a b\u{fffd}[2J");
    }

    proptest! {
        #[test]
        fn any_text_is_one_line_of_bounded_length(text in any::<String>(), times in 0..2_000_usize) {
            let text = text.repeat(times);
            let told = one_line(&text);
            prop_assert!(!told.chars().any(char::is_control));
            prop_assert!(told.chars().count() <= MOST + 40);
            if text.chars().count() <= MOST {
                prop_assert_eq!(bounded(&text), text);
            }
        }
    }
}
