"""Analyses: questions to all clients whose answers are sums, and what is read off the models of a run."""

from fedloom.analyses.form import MAX_QUESTION_BYTES, Analysis, AnalysisTerms, Bounds, Info, Question, Rules, State
from fedloom.analyses.registry import ANALYSES, AnalysisRegistry
from fedloom.analyses.rows import ClientRows, Schema, client_rows, dataset_rows, schema_of
from fedloom.analyses.run import (
    AnalysisResult,
    Answer,
    Ask,
    SumRecord,
    analysis_of,
    analyze,
    answer_question,
    run_questions,
    sum_answers,
)

__all__ = [
    "ANALYSES",
    "MAX_QUESTION_BYTES",
    "Analysis",
    "AnalysisRegistry",
    "AnalysisResult",
    "AnalysisTerms",
    "Answer",
    "Ask",
    "Bounds",
    "ClientRows",
    "Info",
    "Question",
    "Rules",
    "Schema",
    "State",
    "SumRecord",
    "analysis_of",
    "analyze",
    "answer_question",
    "client_rows",
    "dataset_rows",
    "run_questions",
    "schema_of",
    "sum_answers",
]  # fmt: skip
