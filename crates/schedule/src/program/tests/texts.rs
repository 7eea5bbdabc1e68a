use proptest::prelude::*;

use super::programs;
use crate::Program;

proptest! {
    #[test]
    fn both_text_forms_round_trip(program in programs()) {
        prop_assert_eq!(program.to_string().parse::<Program>(), Ok(program.clone()));
        prop_assert_eq!(Program::from_csv(&program.to_csv()), Ok(program.clone()));
        prop_assert_eq!(Program::read(&program.to_string()), Ok(program.clone()));
        prop_assert_eq!(Program::read(&program.to_csv()), Ok(program));
    }

    #[test]
    fn any_text_is_read_or_refused(text in "(shardwright program 1\n)?([0-9FBIWranksw:#,;()\" \n]{0,60})") {
        if let Ok(program) = Program::read(&text) {
            prop_assert_eq!(Program::read(&program.to_string()), Ok(program));
        }
    }
}

#[test]
fn our_form_is_for_people_too() {
    let text =
        "shardwright program 1\n\n# two ranks\nrank 0: 0F0  0B0 # the input side\r\nrank 1:\n";
    let program: Program = text.parse().expect("to be a program");
    assert_eq!(
        program.to_string(),
        "shardwright program 1\nrank 0: 0F0 0B0\nrank 1:\n"
    );
}

#[test]
fn csv_may_have_idle_slots_and_quotes_and_empty_rows() {
    let program =
        Program::from_csv(",0F0, ,\"0I0\",0W0,\r\n\r\n1F0,,1B0\r\n").expect("to be a program");
    assert_eq!(program.to_csv(), "0F0,0I0,0W0\n\n1F0,1B0\n");
}

#[test]
fn actions_that_torch_overlaps_follow_one_another() {
    let program = Program::from_csv("0F1,(0F2;3B0)OVERLAP_F_B,3B1\n").expect("to be a program");
    assert_eq!(program.to_csv(), "0F1,0F2,3B0,3B1\n");
}

#[test]
fn a_bad_cell_is_named_with_its_place_and_what_is_allowed() {
    let allowed = "is no action; allowed are a stage, one of F, B, I and W, and a microbatch, \
                   such as 0F0, 1B3, 0I2 or 0W2";
    for cell in [
        "0X0",
        "F0",
        "0F",
        "0F-1",
        "+0F0",
        "0f0",
        "0F99999999999",
        "0F0;0F1",
        "(0F1;)OVERLAP_F_B",
    ] {
        let error = Program::from_csv(&format!("0F0\n1F0,,{cell}\n")).unwrap_err();
        let value = if cell.starts_with('(') { "" } else { cell };
        assert_eq!(
            error.to_string(),
            format!("row 2 (rank 1), cell 3: {value:?} {allowed}")
        );
    }
    let error = "shardwright program 1\nrank 0: 0F0 oF1"
        .parse::<Program>()
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("row 1 (rank 0), cell 2: \"oF1\" {allowed}")
    );
}

#[test]
fn torch_s_lowered_form_is_refused_by_name() {
    for cell in ["0UNSHARD", "0SEND_F1", "2RECV_B0", "0REDUCE_GRAD"] {
        let error = Program::from_csv(&format!("0F0,{cell}\n")).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!(
                "row 1 (rank 0), cell 2: {cell:?} is no computation; allowed are F, B, I and W, as torch writes \
                 them with format=\"compute_only\""
            )
        );
    }
}

#[test]
fn a_newer_version_is_refused_by_name() {
    let error = Program::read("shardwright program 2\nrank 0: 0F0@7\n").unwrap_err();
    assert_eq!(
        error.to_string(),
        "this is a program of format version 2; this release reads versions up to 1"
    );
    let error = Program::read("shardwright program one\n").unwrap_err();
    assert_eq!(
        error.to_string(),
        "line 1 is \"shardwright program one\"; a program begins with \"shardwright program 1\""
    );
}

#[test]
fn ranks_come_in_order() {
    let error = Program::read("shardwright program 1\nrank 0: 0F0\n\nrank 2: 1F0\n").unwrap_err();
    assert_eq!(
        error.to_string(),
        "line 4 begins with \"rank 2:\"; allowed is \"rank 1:\""
    );
}
