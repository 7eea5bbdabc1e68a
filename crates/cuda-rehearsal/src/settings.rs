//! What the environment says of the machine that is played.

/// The value of a variable, if it is set.
#[expect(
    clippy::disallowed_methods,
    reason = "a C library gets its configuration from nowhere else"
)]
pub(crate) fn text(variable: &str) -> Option<String> {
    std::env::var(variable).ok()
}

/// The same, as a number.
pub(crate) fn number(variable: &str) -> Option<u64> {
    text(variable)?.parse().ok()
}
