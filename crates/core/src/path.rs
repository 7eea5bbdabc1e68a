//! Where in the sequential program a call stands.

use std::fmt;

/// A request's place in a microbatch's sequential program: its number among the requests of the task that made it, behind
/// that task's own path. The step function has the empty path.
///
/// Paths are ordered as one process would make the calls: a caller before what it calls, and a call with all that comes
/// of it before its caller's next one.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallPath(pub Vec<u32>);

impl CallPath {
    /// The path of a task's request with this number.
    #[must_use]
    pub fn followed_by(&self, number: u32) -> Self {
        let mut numbers = Vec::with_capacity(self.0.len() + 1);
        numbers.extend_from_slice(&self.0);
        numbers.push(number);
        Self(numbers)
    }
}

impl fmt::Display for CallPath {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers: Vec<String> = self.0.iter().map(u32::to_string).collect();
        formatter.write_str(&numbers.join("."))
    }
}

#[cfg(test)]
mod tests {
    use super::CallPath;

    #[test]
    fn paths_are_in_the_order_of_the_sequential_program() {
        let root = CallPath::default();
        let (first, second) = (root.followed_by(0), root.followed_by(1));
        let called = first.followed_by(7);
        let deeper = called.followed_by(0);
        let order = [&root, &first, &called, &deeper, &second];
        assert!(order.is_sorted_by(|one, next| one < next));
    }
}
