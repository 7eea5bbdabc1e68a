//! A misuse of the command, told in one line.

use clap::error::ErrorKind;
use shardwright_core::one_line;

/// What is wrong and what helps, in one line; the command's whole help where nothing was asked for.
pub(crate) fn told(error: &clap::Error) -> String {
    let text = error.to_string();
    if error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        return text;
    }
    let mut parts: Vec<String> = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
        if line.starts_with("Usage:") {
            break;
        }
        let line = one_line(line); // an argument may move the cursor, or worse
        match parts.last_mut() {
            Some(last) if last.ends_with(':') || !begins_part(&line) => {
                last.push(' ');
                last.push_str(&line);
            }
            _ => parts.push(line),
        }
    }
    parts.retain(|part| !part.starts_with("For more information"));
    line(&format!(
        "{}; --help says more",
        one_line(&parts.join("; "))
    ))
}

fn begins_part(line: &str) -> bool {
    ["error:", "tip:", "[possible values", "For more information"]
        .iter()
        .any(|begin| line.starts_with(begin))
}

/// A line of the command's own, without what would make it several, and not too long.
pub(crate) fn line(text: &str) -> String {
    one_line(text) + "\n"
}
