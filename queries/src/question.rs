//! Named questions: SQL files under `queries/sql/` that take parameters.
//!
//! A file opens with comment lines: what it answers, then one line a parameter (`-- $name: what it is [= default]`).

/// A question that ships with this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Question {
    pub name: &'static str,
    pub sql: &'static str,
}

/// A parameter of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    pub name: String,
    pub meaning: String,
    pub default: Option<String>,
}

/// Every named question.
pub const QUESTIONS: &[Question] = &[
    Question { name: "before_incident", sql: include_str!("../sql/before_incident.sql") },
    Question { name: "incidents", sql: include_str!("../sql/incidents.sql") },
    Question { name: "throttled_gpus", sql: include_str!("../sql/throttled_gpus.sql") },
];

impl Question {
    pub fn by_name(name: &str) -> Option<Question> {
        QUESTIONS.iter().copied().find(|question| question.name == name)
    }

    /// What the question answers: its first line.
    pub fn title(&self) -> &'static str {
        self.sql.lines().next().unwrap_or_default().trim_start_matches("-- ").trim()
    }

    pub fn parameters(&self) -> Vec<Parameter> {
        let lines = self.sql.lines().take_while(|line| line.starts_with("--"));
        lines
            .filter_map(|line| {
                let (name, rest) = line.strip_prefix("-- $")?.split_once(':')?;
                let (meaning, default) = match rest.rsplit_once(" = ") {
                    Some((meaning, default)) => (meaning, Some(default.trim().to_owned())),
                    None => (rest, None),
                };
                Some(Parameter { name: name.to_owned(), meaning: meaning.trim().to_owned(), default })
            })
            .collect()
    }

    /// The values to run with: those given, else the defaults. Says what is missing or unknown.
    pub fn bind(&self, given: &[(String, String)]) -> Result<Vec<(String, String)>, String> {
        let parameters = self.parameters();
        if let Some((name, _)) =
            given.iter().find(|(name, _)| parameters.iter().all(|parameter| parameter.name != *name))
        {
            let known: Vec<_> = parameters.iter().map(|parameter| parameter.name.as_str()).collect();
            return Err(format!("{} takes no parameter {name}; it takes {}", self.name, known.join(", ")));
        }
        let value = |parameter: &Parameter| {
            let given = given.iter().find(|(name, _)| *name == parameter.name).map(|(_, value)| value.clone());
            let value = given.or_else(|| parameter.default.clone());
            value.map(|value| (parameter.name.clone(), value)).ok_or_else(|| {
                format!("{} needs {}={}; give it with --set", self.name, parameter.name, parameter.meaning)
            })
        };
        parameters.iter().map(value).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_question_says_what_it_answers_and_names_the_parameters_that_its_text_uses() {
        for question in QUESTIONS {
            assert!(question.sql.starts_with("-- ") && question.title().ends_with(['.', '?']), "{}", question.name);
            let body: String =
                question.sql.lines().filter(|line| !line.starts_with("--")).collect::<Vec<_>>().join("\n");
            for parameter in question.parameters() {
                assert!(body.contains(&format!("${}", parameter.name)), "{} {}", question.name, parameter.name);
            }
        }
    }

    #[test]
    fn a_missing_or_unknown_parameter_is_named() {
        let question = Question::by_name("before_incident").expect("exists");
        assert!(question.bind(&[]).expect_err("missing").contains("incident"));
        assert!(question.bind(&[("incidnet".into(), "x".into())]).expect_err("unknown").contains("incidnet"));
        assert_eq!(question.bind(&[("incident".into(), "x".into())]).expect("bound").len(), 2);
    }
}
