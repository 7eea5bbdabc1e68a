//! Tables and drawings.

use super::{later, records, timeline};
use crate::Timeline;

#[test]
fn the_sums_are_a_table_by_step_and_rank() {
    let both = Timeline::new([records(), later(1)].concat(), 2);
    insta::assert_snapshot!(both.sums_text());
}

#[test]
fn a_step_is_drawn_with_letters() {
    insta::assert_snapshot!(timeline().drawing(0, 40));
}

#[test]
fn a_drawing_has_its_width_whatever_that_is() {
    for width in [1, 2, 7, 333] {
        let drawing = timeline().drawing(0, width);
        let row = drawing.lines().nth(1).unwrap();
        let (_, bars) = row.split_once('|').unwrap();
        assert_eq!(bars.trim_end_matches('|').len(), width);
    }
    assert_eq!(timeline().drawing(5, 40), "");
}

#[test]
fn the_picture_has_a_bar_for_each_task_and_says_how_idle_each_rank_is() {
    let picture = timeline().to_svg(0);
    assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
    for colour in ["#3b7dd8", "#e08a2c", "#b8405e", "#e3e6ea", "#2a9d6f"] {
        assert!(
            picture.matches(colour).count() >= 2,
            "{colour}: legend and bar"
        );
    }
    assert_eq!(picture.matches(">idle 50.0 %<").count(), 2);
    assert!(picture.contains("step 0: 40.00 ms; idle 50.0 % over all ranks"));
}
