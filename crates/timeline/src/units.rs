//! Figures as text.

/// Milliseconds, to the hundredth.
#[expect(clippy::cast_precision_loss, reason = "shown to five digits or so")]
pub(crate) fn milliseconds(ns: u64) -> String {
    format!("{:.2}", ns as f64 / 1e6)
}

/// Bytes in the largest unit that leaves a whole number before the point.
#[expect(clippy::cast_precision_loss, reason = "shown to one decimal")]
pub fn size(bytes: u64) -> String {
    let (mut amount, mut unit) = (bytes as f64, "B");
    for larger in ["KiB", "MiB", "GiB", "TiB"] {
        if amount < 1024.0 {
            break;
        }
        amount /= 1024.0;
        unit = larger;
    }
    if unit == "B" {
        format!("{bytes} B")
    } else {
        format!("{amount:.1} {unit}")
    }
}

/// A share in percent.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

/// Rows under one heading, columns aligned to the right but the first `left`.
pub fn table(rows: &[Vec<String>], left: usize) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns)
        .map(|column| {
            let cells = rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        })
        .collect();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = widths[column];
            let gap = if column == 0 { "" } else { "  " };
            let padded = if column < left {
                format!("{cell:<width$}")
            } else {
                format!("{cell:>width$}")
            };
            line.push_str(gap);
            line.push_str(&padded);
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}
