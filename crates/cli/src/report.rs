//! What was found, line by line.

use std::fmt::Write;

use serde::Serialize;

/// How well one thing is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CheckStatus {
    /// It is as it should be.
    Ok,
    /// It works, but may become a trouble.
    Warn,
    /// It is not there, or does not work.
    Missing,
}

impl CheckStatus {
    const fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Missing => "missing",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What.
    pub name: String,
    /// How well it is.
    pub status: CheckStatus,
    /// Whether no job can run without it.
    pub required: bool,
    /// What was found.
    pub found: String,
    /// What to do about it; nothing where all is well.
    pub advice: Option<String>,
}

impl Check {
    /// All is well.
    pub fn ok(name: &str, found: impl Into<String>) -> Self {
        Self {
            name: name.to_owned(),
            status: CheckStatus::Ok,
            required: false,
            found: found.into(),
            advice: None,
        }
    }

    /// It may become a trouble.
    pub fn warn(name: &str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            status: CheckStatus::Warn,
            advice: Some(advice.into()),
            ..Self::ok(name, found)
        }
    }

    /// It is not there.
    pub fn missing(name: &str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self {
            status: CheckStatus::Missing,
            ..Self::warn(name, found, advice)
        }
    }

    /// No job can run without it.
    #[must_use]
    pub fn required(self) -> Self {
        Self {
            required: true,
            ..self
        }
    }
}

/// All that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// In the order of looking.
    pub checks: Vec<Check>,
}

#[derive(Serialize)]
struct Json<'a> {
    well: bool,
    checks: &'a [Check],
}

impl Report {
    /// Whether nothing is missing that is required.
    pub fn is_well(&self) -> bool {
        self.checks
            .iter()
            .all(|check| check.status != CheckStatus::Missing || !check.required)
    }

    /// A line for each, and one more for what to do about it.
    pub fn to_text(&self) -> String {
        let width = self.checks.iter().map(|check| check.name.len()).max();
        let width = width.unwrap_or(0);
        let mut text = String::new();
        for check in &self.checks {
            let (status, name) = (check.status.word(), &check.name);
            let found = &check.found;
            writeln!(text, "{status:<7}  {name:<width$}  {found}").expect("text takes all");
            if let Some(advice) = &check.advice {
                writeln!(text, "{:<7}  {:<width$}  -> {advice}", "", "").expect("text takes all");
            }
        }
        let last = if self.is_well() {
            "a job can run here"
        } else {
            "no job can run here: see what is missing above"
        };
        writeln!(text, "\n{last}").expect("text takes all");
        text
    }

    /// One JSON object.
    pub fn to_json(&self) -> String {
        let json = Json {
            well: self.is_well(),
            checks: &self.checks,
        };
        let text = serde_json::to_string_pretty(&json).expect("names and text are JSON");
        text + "\n"
    }
}

#[cfg(test)]
mod tests {
    use super::{Check, Report};

    #[test]
    fn only_what_is_required_and_missing_makes_a_report_bad() {
        let well = |check: Check| {
            Report {
                checks: vec![check],
            }
            .is_well()
        };
        assert!(well(Check::ok("a", "b").required()));
        assert!(well(Check::warn("a", "b", "c").required()));
        assert!(well(Check::missing("a", "b", "c")));
        assert!(!well(Check::missing("a", "b", "c").required()));
    }

    #[test]
    fn a_report_reads_line_by_line() {
        let checks = vec![
            Check::ok("python", "3.11"),
            Check::missing("ucx", "not found", "install it"),
        ];
        let text = Report { checks }.to_text();
        let lines: Vec<&str> = text.lines().collect();
        let expected = [
            "ok       python  3.11",
            "missing  ucx     not found",
            "                 -> install it",
            "",
            "a job can run here",
        ];
        assert_eq!(lines, expected);
    }

    #[test]
    fn a_report_is_one_json_object() {
        let checks = vec![Check::warn("files", "64", "raise it").required()];
        let json: serde_json::Value =
            serde_json::from_str(&Report { checks }.to_json()).expect("to be JSON");
        assert_eq!(json["well"], true);
        assert_eq!(json["checks"][0]["status"], "warn");
        assert_eq!(json["checks"][0]["advice"], "raise it");
    }
}
